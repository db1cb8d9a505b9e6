"""Text completions, tokens and embeddings, in llama-server's and OpenAI's forms.

Import from its modules.
"""
