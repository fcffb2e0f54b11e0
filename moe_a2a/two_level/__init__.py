"""More than one node: moe_a2a within each node, the caller's process group between the nodes. docs/nodes.md.

rail.py is the link between the nodes, and how they agree; collectives.py, expert_parallel.py and
token_dispatcher.py are the objects.
"""

from __future__ import annotations

from moe_a2a.two_level.collectives import TwoLevelCollectives
from moe_a2a.two_level.expert_parallel import TwoLevelExpertParallel
from moe_a2a.two_level.handle import TwoLevelHandle
from moe_a2a.two_level.token_dispatcher import TwoLevelTokenDispatcher

__all__ = ["TwoLevelCollectives", "TwoLevelExpertParallel", "TwoLevelHandle", "TwoLevelTokenDispatcher"]
