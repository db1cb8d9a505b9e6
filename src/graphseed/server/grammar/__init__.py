"""Grammars and JSON schemas, which a library made for them compiles. Import from its modules."""
