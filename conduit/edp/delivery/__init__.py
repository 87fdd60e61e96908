"""Delivery: which rows make a batch. One sampler a file."""

from conduit.edp.delivery.replay import Ahead, Delivery, Replay

__all__ = ["Ahead", "Delivery", "Replay"]
