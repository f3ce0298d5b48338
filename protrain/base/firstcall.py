"""torch's first elementwise function is called by one thread.

On the CPU torch computes exp, tanh, erf, sqrt and others with MKL's vector functions, and the first call of any of them asks
which processor this is. Where threads share a large tensor, two of them ask at once, and now and then one gets functions of
another kind for its share: right, but with other last bits, in the first step alone, so that two runs of a script differ. After a
call of one thread nothing is asked again. A call on 16 elements is one thread's, and changes no result of later calls.
"""

from __future__ import annotations

import torch

torch.exp(torch.zeros(16))
