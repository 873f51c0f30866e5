"""vLLM behind the router: what it answers, and how soon, beside this project's own engine and vLLM's own prefill."""
