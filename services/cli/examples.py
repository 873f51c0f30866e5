"""The calls that `hypic up` shows once it serves."""

__all__ = ["client_examples"]

# Long enough to be captured, and within what the demo model answers.
_EXAMPLE_TEXT = (
    "Plepi is a port on the northern coast. The town was founded in 1903. It has 8215 inhabitants and a school for "
    "pilots. In summer the market is held beside the harbour, and most visitors come by ferry."
)


def client_examples(base_url: str, model: str, key_note: str) -> str:
    """A curl call and an `openai` client call that work against the running stack; a second call reuses the document."""
    return f"""
Serving {model} at {base_url}/v1. Try (twice: the second time the document is reused):

  curl -s {base_url}/v1/chat/completions -H 'content-type: application/json' -d '{{
    "model": "{model}", "temperature": 0, "max_tokens": 32,
    "documents": [{{"title": "Plepi", "text": "{_EXAMPLE_TEXT}"}}],
    "messages": [{{"role": "user", "content": "When was Plepi founded?"}}],
    "hypic": {{"explain": true}}}}'

  from openai import OpenAI
  client = OpenAI(base_url="{base_url}/v1", api_key="unused")
  reply = client.chat.completions.create(
      model="{model}", temperature=0, max_tokens=32,
      messages=[{{"role": "user", "content": "When was Plepi founded?"}}],
      extra_body={{"documents": [{{"title": "Plepi", "text": "{_EXAMPLE_TEXT}"}}],
                  "hypic": {{"explain": True}}}})
  print(reply.choices[0].message.content, reply.usage.prompt_tokens_details.cached_tokens)

{key_note}
Stop with Ctrl-C. What it does meanwhile: {base_url}/console
"""
