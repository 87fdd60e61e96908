"""Delivery: which rows make a batch. One sampler a file."""

from conduit.edp.delivery.replay import Delivery, Replay

__all__ = ["Delivery", "Replay"]
