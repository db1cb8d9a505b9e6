"""What endpoints share of the wire: fields of a body, parameters, event streams, replies.

Import from its modules.
"""
