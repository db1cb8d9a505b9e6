"""Where the host's time goes in a prompt's path, and what replay saves. Import from its modules."""
