"""Whether kernels run whole passes over a model, so that these may be recorded and captures need nothing of the host."""

from services.worker.engine.context import EngineContext
from services.worker.ops.device import has_kernels
from services.worker.ops.paged_attention.dispatch import takes_kernel

__all__ = ["captures_whole", "runs_kernel_passes"]


def runs_kernel_passes(context: EngineContext) -> bool:
    """Kernels run all layers, the linear ones alike."""
    mixers, page_tokens = context.model.linear_mixers, context.pages.page_size
    kinds = {
        (mixer.projection.decays_channels, mixer.projection.erases, mixer.shape.conv_taps, mixer.shape.key_dim)
        for mixer in mixers
    }
    takes_attention = all(
        takes_kernel(context.device, shape.key_dim, page_tokens, shape.latent_dim) for shape in context.model.spec.pages
    )
    return has_kernels(context.device) and len(kinds) == 1 and takes_attention


def captures_whole(context: EngineContext) -> bool:
    """Segments of one chunk leave planes where these are to stay, as the pass has worked them out.

    Not where end states are turned, or another encoding read back, behind the pass; nor decays alone multiplied on the host.
    """
    mixers = context.model.linear_mixers
    keeps = all(mixer.rotary is None and mixer.projection.erases and mixer.shape.conv_taps > 1 for mixer in mixers)
    return context.profile.encoding.is_exact and keeps and runs_kernel_passes(context)
