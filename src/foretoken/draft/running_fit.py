"""Least squares over what came lately, with three coefficients: plain numbers, since numpy takes as long as a draft."""

from dataclasses import dataclass

Three = tuple[float, float, float]


@dataclass
class RunningFit:
    """y = r . x by ridge regression towards `prior`, which weighs as much as one observation. `forget`: a step.

    gram: the sums of x1 x1, x1 x2, x1 x3, x2 x2, x2 x3, x3 x3; moment: of y x.
    """

    prior: Three
    forget: float
    gram: tuple[float, float, float, float, float, float] = (0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    moment: Three = (0.0, 0.0, 0.0)
    _solved: Three | None = None

    def learn(self, x: Three, y: float) -> None:
        (u, v, w), (a, b, c, d, e, f), (p, q, r), k = x, self.gram, self.moment, self.forget
        self.gram = (k * a + u * u, k * b + u * v, k * c + u * w, k * d + v * v, k * e + v * w, k * f + w * w)
        self.moment = (k * p + y * u, k * q + y * v, k * r + y * w)
        self._solved = None

    @property
    def coefficients(self) -> Three:
        """r, with 0 for what came out below 0: by the cofactors of the symmetric matrix."""
        if self._solved is None:
            (a, b, c, d, e, f), (p, q, r), (before_p, before_q, before_r) = self.gram, self.moment, self.prior
            a, d, f, p, q, r = a + 1, d + 1, f + 1, p + before_p, q + before_q, r + before_r
            aa, ab, ac, bb, bc, cc = (
                d * f - e * e,
                c * e - b * f,
                b * e - c * d,
                a * f - c * c,
                b * c - a * e,
                a * d - b * b,
            )
            size = a * aa + b * ab + c * ac
            first, second, third = aa * p + ab * q + ac * r, ab * p + bb * q + bc * r, ac * p + bc * q + cc * r
            self._solved = (max(first / size, 0.0), max(second / size, 0.0), max(third / size, 0.0))
        return self._solved
