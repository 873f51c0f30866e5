"""Causal attention of queries at arbitrary true positions over shared pages of keys and values.

Keys are stored rotated by their place inside their own part, values as they are. A page-table row says where a page's
tokens stand in one prompt; the query is rotated by its distance to the row's base, so that stored bytes never change.
"""

from services.worker.ops.paged_attention.types import AttentionShape, PagedQueries, PageRow, PageRun, PageTable

__all__ = ["AttentionShape", "PageRow", "PageRun", "PageTable", "PagedQueries"]
