"""llama-bench's tests under every policy side by side. Import from its modules."""
