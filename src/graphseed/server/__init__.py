"""HTTP: what llama-server and OpenAI clients expect, over the engine's thread.

Owns requests on the wire and their translation. Imports no torch: the engine and the model are
called, their tensors are not touched. Import from its modules.
"""
