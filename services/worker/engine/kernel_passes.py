"""Whether kernels run whole passes over a model, so that these may be recorded and captures need nothing of the host."""

from services.worker.engine.context import EngineContext
from services.worker.ops.device import has_kernels
from services.worker.ops.paged_attention.dispatch import takes_kernel

__all__ = ["captures_whole", "runs_kernel_passes"]


def runs_kernel_passes(context: EngineContext) -> bool:
    """Kernels run all layers, the linear ones alike, and read stored bodies as they are."""
    mixers, page_tokens = context.model.linear_mixers, context.pages.page_size
    kinds = {(mixer.projection.decays_channels, mixer.shape.conv_taps, mixer.shape.key_dim) for mixer in mixers}
    takes_attention = all(
        takes_kernel(context.device, shape.key_dim, page_tokens, shape.latent_dim) for shape in context.model.spec.pages
    )
    takes_bodies = all(mixer.rotary is None and mixer.projection.conv is not None for mixer in mixers)
    return has_kernels(context.device) and len(kinds) == 1 and takes_attention and takes_bodies


def captures_whole(context: EngineContext) -> bool:
    """Segments of one chunk leave planes where these are to stay, as the pass has worked them out."""
    return context.profile.encoding.is_exact and runs_kernel_passes(context)
