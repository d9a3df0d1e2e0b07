"""Deployment: the algorithm of a simulation on real processes that talk over Flower's network.

The server's part of a round runs in one process, and the clients at nodes, which keep their data and their memories. See
`docs/deployment.md`.
"""

from fedsim.deployment._app import ExistingNetwork as ExistingNetwork
from fedsim.deployment._app import server_app as server_app
from fedsim.deployment._app import write_app as write_app
from fedsim.deployment._certificates import Certificates as Certificates
from fedsim.deployment._certificates import check_certificate as check_certificate
from fedsim.deployment._deploy import check_deployable as check_deployable
from fedsim.deployment._deploy import check_options as check_options
from fedsim.deployment._deploy import deploy as deploy
from fedsim.deployment._deploy import deployment_of as deployment_of
from fedsim.deployment._deployed import Deployed as Deployed
from fedsim.deployment._deployed_steps import DeployedSteps as DeployedSteps
from fedsim.deployment._encoding import decode as decode
from fedsim.deployment._encoding import encode as encode
from fedsim.deployment._node import Node as Node
from fedsim.deployment._nodes import NodeError as NodeError
from fedsim.deployment._nodes import Nodes as Nodes
from fedsim.deployment._nodes import Received as Received
from fedsim.deployment._nodes import Replies as Replies
from fedsim.deployment._processes import FlowerProcesses as FlowerProcesses
from fedsim.deployment._real_server import Outcome as Outcome
from fedsim.deployment._real_server import RealServer as RealServer
