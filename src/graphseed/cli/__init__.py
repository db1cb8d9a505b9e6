"""The command line. Owns parsing and composing; every answer comes from the layers below."""
