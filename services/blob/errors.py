"""Why a blob's bytes are not used; whoever reads one computes the state anew.

BlobError
├── DamagedBlobError  bytes are missing, or are not those that were written
└── ForeignBlobError  whole, but of another layout version, model, profile or segment
"""

__all__ = ["BlobError", "DamagedBlobError", "ForeignBlobError"]


class BlobError(Exception):
    """The root: the blob is of no use here."""


class DamagedBlobError(BlobError):
    """A byte differs from what was written, or some are missing; the message says where."""


class ForeignBlobError(BlobError):
    """Written for something else; the message names the field and both values."""
