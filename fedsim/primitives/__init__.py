"""Federated programs as JAX programs: values of the server and of clients, and the operations between them.

Every function binds JAX primitives, so programs can be compiled, differentiated and vectorized, and the derivative of a program
is again a program of these primitives. A function of a server's and of clients' values is a federated algorithm:

>>> import jax, jax.numpy as jnp
>>> clients = Placement("clients", 3)
>>> examples = place(jnp.array([[1.0, 2.0], [3.0, 5.0], [0.0, 1.0]]), clients)
>>> def loss(params, examples):
...     return mean(map(lambda params, own: jnp.mean((own - params) ** 2), broadcast(params, clients), examples))
>>> fedsgd = jax.jit(jax.grad(loss))
>>> fedsgd(jnp.float32(0), examples).item()
-4.0
"""

from fedsim.primitives._fused import program as program
from fedsim.primitives._loop import bounded_loop as bounded_loop
from fedsim.primitives._placed import Placed as Placed
from fedsim.primitives._placed import broadcast as broadcast
from fedsim.primitives._placed import count as count
from fedsim.primitives._placed import map as map
from fedsim.primitives._placed import max as max
from fedsim.primitives._placed import mean as mean
from fedsim.primitives._placed import min as min
from fedsim.primitives._placed import place as place
from fedsim.primitives._placed import reduce as reduce
from fedsim.primitives._placed import sum as sum
from fedsim.primitives._placed import weighted_mean as weighted_mean
from fedsim.primitives._placement import Placement as Placement
from fedsim.primitives._placement import without_mesh_of_context as without_mesh_of_context
from fedsim.primitives._stages import Leak as Leak
from fedsim.primitives._stages import Program as Program
from fedsim.primitives._stages import Stage as Stage
from fedsim.primitives._stages import stages as stages
