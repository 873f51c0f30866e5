"""Parameters that are refused, and what to do instead."""

from typing import Any

__all__ = ["REMEDIES", "UNSUPPORTED"]

# Parameters of OpenAI's and vLLM's API that would change the reply and cannot be honoured, with the values that
# ask for nothing.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "prompt_logprobs": (0,),
    "echo": (False,),
    "suffix": ("",),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
}


# What to do instead, where leaving the parameter out is not all there is to say.
REMEDIES = {
    "best_of": "ask for several choices with n, and choose among them by their logprobs",
    "prompt_logprobs": "log probabilities are told of generated tokens only, by logprobs",
    "echo": "put the prompt in front of the reply on the client's side",
    "suffix": "put what follows into the prompt, in the form that the model was trained on",
    "functions": "use tools",
    "function_call": "use tool_choice",
    "modalities": "this server writes text; ask for ['text']",
    "audio": "this server writes text",
    "web_search_options": "search on the client's side and send what was found as documents",
}
