"""Committed results as pages: what figures.py writes, from benchmarks/results/*.jsonl."""
