"""placeholder"""

from torch import nn


class PagedParameter(nn.Parameter):
    """placeholder"""
