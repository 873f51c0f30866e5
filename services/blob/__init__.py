"""Segment states as bytes: header, planes, checksums, encodings. Knows nothing of the worker, and is imported alone."""
