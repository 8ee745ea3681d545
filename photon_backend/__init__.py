"""Photon on Triton: a vision-language back end whose decode loop leaves the GPU no idle gap."""

__version__ = "0.1.0"
