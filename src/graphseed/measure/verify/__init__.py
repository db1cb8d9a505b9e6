"""The proof that every policy computes the same bytes (I9). Import from its modules."""
