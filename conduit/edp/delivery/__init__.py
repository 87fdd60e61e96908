"""Delivery: which rows make a batch. One sampler a file."""

from conduit.edp.delivery.replay import Ahead, Delivery, Late, Replay

__all__ = ["Ahead", "Delivery", "Late", "Replay"]
