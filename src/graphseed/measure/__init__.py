"""What measurements and proofs run: plans instead of requests, policies side by side.

Owns the figures that `demo`, `bench`, `attribute` and `verify` print. Does not parse arguments and
prints nothing: the command line does. Import from its modules.
"""
