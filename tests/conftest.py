"""Ctrl-C must mean something: a background job starts with SIGINT ignored, and so would all that tests start."""

import signal

signal.signal(signal.SIGINT, signal.default_int_handler)
