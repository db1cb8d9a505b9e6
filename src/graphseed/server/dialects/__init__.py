"""Chat in three dialects: OpenAI's chat and responses, and Anthropic's messages.

Import from its modules.
"""
