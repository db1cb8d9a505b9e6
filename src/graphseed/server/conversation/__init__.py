"""From messages to a prompt, and from what the model wrote to text, thoughts and calls.

Import from its modules.
"""
