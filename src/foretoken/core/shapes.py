"""Shape annotations such as Float[Tensor, "n v"]: checked under pytest, and only words where jaxtyping is absent."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
else:
    try:
        from jaxtyping import Bool, Float, Int
    except ImportError:

        class Float:
            """Float[Tensor, "n v"] is then just Tensor."""

            def __class_getitem__(cls, item: tuple[Any, str]) -> Any:
                return item[0]

        Bool = Int = Float

__all__ = ["Bool", "Float", "Int"]
