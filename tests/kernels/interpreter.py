"""Triton's interpreter on the CPU."""

from typing import Any

__all__ = ["adapt_interpreter"]


def adapt_interpreter() -> None:
    """Let loops run to bounds that a kernel loads, dots be asked for in the precisions that a GPU has, and multiply bf16.

    The interpreter's scalars are arrays of one element, which numpy from 2.4 on no longer takes as the bounds of a range; its
    dots are fp32 whatever is asked for, and take the bits of bf16 numbers for integers.
    """
    from dataclasses import replace

    from triton import language
    from triton.runtime import interpreter

    options = interpreter.interpreter_builder.options
    allowed = (*options.allowed_dot_input_precisions, "bf16x3")
    interpreter.interpreter_builder.options = replace(options, allowed_dot_input_precisions=allowed)

    dot = interpreter.InterpreterBuilder.create_dot

    def widen(operand: Any) -> Any:  # noqa: ANN401 # triton ships no types
        return (
            interpreter.interpreter_builder.cast_impl(operand, language.float32)
            if operand.dtype == language.bfloat16
            else operand
        )

    def dot_of_wide(builder: Any, left: Any, right: Any, *rest: Any) -> Any:  # noqa: ANN401 # triton ships no types
        return dot(builder, widen(left), widen(right), *rest)

    interpreter.InterpreterBuilder.create_dot = dot_of_wide
    patch = interpreter._patch_lang_tensor

    def patch_with_index(tensor: Any, scope: Any) -> None:  # noqa: ANN401 # triton ships no types
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_with_index
