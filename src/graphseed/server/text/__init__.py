"""Text completions, tokens, embeddings and reranking, in llama-server's and OpenAI's forms.

Import from its modules.
"""
