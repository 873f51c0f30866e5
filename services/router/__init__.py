"""The router: REST in, prompt to parts, planning, and the stream of text out."""
