"""Causal attention of a step's new tokens over latents that all heads share."""

from kernels_pallas.latent_attention.contract import LatentArguments, UpProjections, check
from kernels_pallas.latent_attention.reference import latent_attention as reference
from kernels_pallas.latent_attention.xla import latent_attention as xla

__all__ = ["LatentArguments", "UpProjections", "check", "reference", "xla"]
