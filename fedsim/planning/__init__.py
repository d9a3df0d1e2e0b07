"""What a round costs and what the server learns in it, determined before any round runs."""

from fedsim.planning._audit import Audit as Audit
from fedsim.planning._audit import audit as audit
from fedsim.planning._collectives import Collective as Collective
from fedsim.planning._collectives import collectives_in as collectives_in
from fedsim.planning._costs import plan as plan
from fedsim.planning._flops import flops_of as flops_of
from fedsim.planning._plan import Plan as Plan
from fedsim.planning._plan import duration as duration
