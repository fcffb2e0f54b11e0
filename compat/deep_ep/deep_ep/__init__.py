"""deep_ep over moe_a2a: see moe_a2a.integrations.deep_ep."""

from moe_a2a.integrations.deep_ep import *  # noqa: F403
from moe_a2a.integrations.deep_ep import __all__  # noqa: F401
