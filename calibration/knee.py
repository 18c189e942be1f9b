"""Where added users bring little: the one definition of the knee, of what is measured (:mod:`calibration.saturation`) and
of what is predicted (:mod:`calibration.limits`).

On ``X = a N / (1 + b N)`` an added user brings ``1 / (1 + b N)**2`` of what the first one brings. At a quarter of that the
server gives half of what it can: in 36 published steps that double the users at such a slope, tokens per second still
grew by 44 % (median; 122 sweeps of the public table); at a tenth they grew by 21 %, and the server gives two thirds.
Nobody is stopped there: where the knee binds, the first limit that stops users is told beside it.
"""

from __future__ import annotations

#: share of what the first user brings (tokens per second) under which an added user is beyond the knee
KNEE_SLOPE = 0.1
