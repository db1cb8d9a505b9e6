"""Slots and the files they are saved to. Import from its modules."""
