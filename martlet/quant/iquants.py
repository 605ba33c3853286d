"""Decoding of the i-quants below 4 bits (read `encode.py` next; `ggml.py` has the other types).

For every 8 (IQ3: 4) values, a block of these types has an index into a codebook of magnitudes, or
of signed values (IQ1). IQ2 and IQ3 add a sign per value; IQ1 adds ±1/8 to all values of a group.
The codebooks are those of ggml-common.h of llama.cpp. Shapes: N blocks of 256 values; a decoder
turns N records of `blocks.LAYOUTS` into float32 [N, 256].
"""

import base64
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from martlet.quant.table import BlockType

F32 = NDArray[np.float32]
U8 = NDArray[np.uint8]
I8 = NDArray[np.int8]
Blocks = NDArray[Any]  # records of one of LAYOUTS

# A codebook is a set of combinations of `width` values. Combination i has the values that the
# digits of i in base len(values) select, lowest digit first. A bit for each i says whether the book
# has it; entries are numbered in the order of i. These are the bits of six books in a row,
# compressed.
_BITS = zlib.decompress(
    base64.b85decode(
        "c-nPWL9ZM~5w2<Vh|b`kUT4;rgGIm9vo!1}5eY}s<ILF4kxgdonLH3#nMjFpLh`}R#WJ)<&tklQw1ya8K<c-$rD0C+2M|a`LgM0QIkAwi5E79B7fun"
        "U5URUpc6J}mX!pI@uCA)Ds=uo4ZkwoOld1v{O@IM_AP@lo^9B$wQq`a$K>{2{vBqxzpukM2a6F3aME9{;47w*0jNvp<gHZTFj21r1O=N<gNvFlSuXW"
        ")bt&GUvsQV$SPCC=(r_#=nQwsWdKq{1yezxdzI+^)61Ohf62QR>EFoq!mbLtZ?*gO1$*=fuGT}7&32pO0fj5F0I#eUhuVid}%hz;EVBT;J>#cGaVV!"
        "%w+#rCP}G}Vd7FwKIjhbW_G#=aKA;m2gNTM9u|iYo(_He?9WdbBxL8)2<`7{XJmPs2KH=yOP(skQO2&ylT=9M0x5-k<r1&!5(|?Yv!9%~DO<Hds~+*"
        "*cwLtq4#G0wZb+gHVJ-7Q!ZxX~(`+*O4oTj^oTA6v`21+Rjmn^afEBKv4JTGzOP8XQb-mvTNdAwT7;y>J9LuL+uQL2$=EORh@DZCzWMhUo=jr`rNTf"
        "Sud=&Y3o4Q<WF44Hm)vYm|%F7>J4I|Y&|IyxdkUCQG^Xeqg3a$vi=9&bm_Gr3(%Xq24d68OnNFez}6ayz-$oG@q>{Kl8`Qk%)kmZ8RbZ$$Ql=1S+m2"
        "u1GSN8(YGVgXw?W~H)vE>yI`X*S+1g~EgG`MPcjrc&Nj(5o%JwdnGh};%9T6Yq&FIwm}bD%K}LrwL~M4Jq5mSc#9CXjxg=5VMZjiv*-WN!zU-EuL#>"
        "Cu2-g)&+vvJA9B(7tM9A@=6;RjsZ;2C{>2e;lZG;~~e-zCl%hskfT1XS3TQNbAS@DQzw`*Y0%+Yc)kFXw%i#CEFsw$zuQgSe8MAl%W9VM|I=fa3EVk"
        "cs**LF;w&YO9qg{om1U|BjX26I!d8YURUhQYeux~y`IFqq9wvnm@~q4>uXjfuI5CMFxYLs&J!glurNt!oD0L_yUfL<1~xA~Ey{0s-rn1`Re=3;r+U$"
        "aaFL(^?sX4!jK+MYi(}23@zX{8}~|5fWxOZga>C3}HE==IaKTm946S*=)F`!!~H-dII)|I-1tlYhdZXV>76mP77DL?z&4KvNEDz)uD{Ym{F_!#9G#d"
        "E6bL3T6R%b-*_BjpOM3wt-?0VTMcK7`VjMxy;Ih2?5wX-61mnm?+mK0;~v^yNDp+a2@n;jE=}#dXy2Eo=6v~+@mn-czs(C8?FUgzC(C<{_GL^*$AQQ"
        "G?+btQw9K9>A3_3I`BLn2f?9hcFNjb*Kf=G_bFaXWXrCTE)$*l!`Bk6hZ$q&?E>nKy6VAgB&{tT7bnMaWFZ@@tF}-;8c6zmZ^P5k0XHVnHCz9F4KVL"
        "p86G-SdpJlP+P+a&z`qzX$PT>Z*QRX2}6e4V5x>)W__kAuOjNhbNF`Xiel=5E(ku3O$aqRg=CFOB?ES2F01>eW_BYcTX1QGghYL3n5{TTAN;5Uy%8b"
        "b~pcqwUF0Nwd%el;A=ZkFROL7Z_JCUOg6IO_Sk&llyZ^kA0ke)pq;gZIW~@%Oh5^2v(@J-S80yx=8$;p=IVe)1jv%VP-=itz}j=O3hLIP<;uTsFIYV"
        ")nx)ssA|Tc^2-baPype@zTlNYyWvXzVh4aKX`KK-~ave-QUfw{o-%``0UfSFYVm@QJ%2!`sJ;XpC3PruYNY$zWWDHoPPP(>*MU?W5AI4nQ{kYTx9Ri"
        "pU1bKi$h4^CGSrVa}M9g%krsw=X&m6l-`H`yz<5KcUjD?l-I)M$M*$fCJ&UWn=~$eIZMuM`3vtj<mqX71G@)i?3LKAa!JGT@7a!BW$klA8%3p0(ga4"
        "pQ~pN&-ifmGfM)TT7m__bF<Oh9Hpr;AGF}#i2bs~@8-q1?hK}OwI4(h%mihAsGAqzU?3G!_L%1`NiGTfJc!KA%N9Qr*lV81B($~Uc-}jHa>tzy|@Wy"
        "E*k}S)|<!*Y%PdR7Q&l89*yH(CCMelqME|ikr2lksux5^qR9l!EA#VSBw*^KU{65^wa@NNY4qov`-SXzXmZ9WP!!f^ycmd2oJaxJlp!b~Sx;`ZK1og"
        "+19tf{Ls4j%I$jA7NBs4cfSph!Zdv&J+1UAi4C)6$+!G$?86HCffGJ(x+lR?}u!XG`NB3ad9#I@X@TNz!$W+WO<hmxtblu8<K61f<T;KDGW#$H|PcK"
        "`M=w>lPl4R0ce?oq~W9aeFB6z{dq&JE<rPr$TT2bmN5eFjgl6s)yr@v?nUkE7-HW=sbY3#)X@<emd`uho&nV`_g^A)mfxkKR(f+4R+w2x$$ZP?au!u"
        "OmiYy!IgHV9#Xe)wEO5^5BU8|pZ)m3?Sw%h{`j+`KAFLSC;9@@UZO@jVj;}|Yspg}oMdPYv)kZrvpOGtpkISPibu6vAO$LQvK9-f#Mwn$<3trkkWFx"
        "&m0HNR?9PBZp+^2eo9jY*@9W#!I|AirA-f?*uyapFnZP|JhQ&4xZ!;-8#X;>GBdAFwQQX`NOHq7Ha#^s<9GoUfAXH`eldBwaz)zu7yjDw11s;95C86"
        ";Tj^MSpC6IY)D-(Mh$(rp+t~|VRU_rPO88h^jzSR;Y@$Me52a4m6s0G}@9lj8j#zIM6napn?>lpUz9lXQ48y_)FSG!r%@AQQkH7C>?{UwYEDwJZfTP"
        "U-T0v6r<gZ2y9*}8>Wwz($=<Y<V$cPflVS|8g6N5cCnvgj|Ja-9VK1EK_w=l"
    )
)
_SHAPES: dict[str, tuple[int, tuple[int, ...]]] = {  # width and values, in the order of _BITS
    "IQ2_XXS": (8, (8, 25, 43)),
    "IQ2_XS": (8, (8, 25, 43)),
    "IQ2_S": (8, (8, 25, 43)),
    "IQ1": (8, (-1, 0, 1)),
    "IQ3_XXS": (4, (4, 12, 20, 28, 36, 44, 52, 62)),
    "IQ3_S": (4, (1, 3, 5, 7, 9, 11, 13, 15)),
}


def _books() -> dict[str, I8]:
    """The codebooks, int8 [entries, width]."""
    books, start = {}, 0
    for name, (width, values) in _SHAPES.items():
        base = len(values)
        n_bytes = -(-(base**width) // 8)
        members = np.flatnonzero(np.unpackbits(np.frombuffer(_BITS, np.uint8, n_bytes, start)))
        books[name] = np.array(values, np.int8)[members[:, None] // base ** np.arange(width) % base]
        start += n_bytes
    return books


_BOOKS = _books()


def _split(packed: NDArray[Any], bits: int, count: int) -> NDArray[Any]:
    """The `count` lowest fields of each number [N, m], lowest first: [N, m * count]."""
    shifts = np.arange(0, bits * count, bits, dtype=packed.dtype)
    fields: NDArray[Any] = (packed[:, :, None] >> shifts) & packed.dtype.type((1 << bits) - 1)
    return fields.reshape(len(packed), -1)


def _signs(bits: U8) -> I8:
    """±1 for each bit of [N, 32] bytes, -1 where it is set: [N, 256]."""
    flags: U8 = np.unpackbits(bits, axis=1, bitorder="little")
    return np.int8(1) - np.int8(2) * flags.view(np.int8)


def _even(bits: NDArray[Any]) -> U8:
    """Seven sign bits and the eighth that makes their number even."""
    signs: U8 = (bits | (np.bitwise_count(bits) & 1).astype(bits.dtype) << 7).astype(np.uint8)
    return signs


def _put(scales: F32, values: NDArray[Any], out: F32) -> None:
    """out = scales * values; each of the scales [N, s] is that of 256 / s neighbouring values."""
    shape = (len(scales), scales.shape[1], -1)
    np.multiply(scales[:, :, None], values.reshape(shape), out=out.reshape(shape), dtype=np.float32)


def _halves(d: NDArray[Any], scales: NDArray[Any], factor: float) -> F32:
    """d * (1/2 + scale) * factor, [N, s]."""
    return d.astype(np.float32)[:, None] * (np.float32(0.5) + scales.astype(np.float32)) * np.float32(factor)


def _iq2_xxs(b: Blocks, out: F32) -> None:
    """Eight pairs of words: four indices, then four times seven signs and a scale."""
    index = _split(np.ascontiguousarray(b["qs"][:, :, 0]), 8, 4)
    signs = b["qs"][:, :, 1]
    values = _BOOKS["IQ2_XXS"][index].reshape(out.shape) * _signs(_even(_split(signs, 7, 4)))
    _put(_halves(b["d"], signs >> 28, 0.25), values, out)


def _iq2_xs(b: Blocks, out: F32) -> None:
    """Words of nine bits of index and seven signs."""
    values = _BOOKS["IQ2_XS"][b["qs"] & 511].reshape(out.shape) * _signs(_even(b["qs"] >> 9))
    _put(_halves(b["d"], _split(b["scales"], 4, 2), 0.25), values, out)


def _iq2_s(b: Blocks, out: F32) -> None:
    index = b["qs"] | _split(b["qh"], 2, 4).astype(np.uint16) << 8
    values = _BOOKS["IQ2_S"][index].reshape(out.shape) * _signs(b["signs"])
    _put(_halves(b["d"], _split(b["scales"], 4, 2), 0.25), values, out)


def _iq3_xxs(b: Blocks, out: F32) -> None:
    values = _BOOKS["IQ3_XXS"][b["qs"]].reshape(out.shape) * _signs(_even(_split(b["signs"], 7, 4)))
    _put(_halves(b["d"], b["signs"] >> 28, 0.5), values, out)


def _iq3_s(b: Blocks, out: F32) -> None:
    index = b["qs"] | _split(b["qh"], 1, 8).astype(np.uint16) << 8
    values = _BOOKS["IQ3_S"][index].reshape(out.shape) * _signs(b["signs"])
    scales = np.float32(1) + np.float32(2) * _split(b["scales"], 4, 2).astype(np.float32)
    _put(b["d"].astype(np.float32)[:, None] * scales, values, out)


def _iq1(d: F32, scales: NDArray[Any], index: NDArray[Any], minus: NDArray[Any], out: F32) -> None:
    """d * (2 * scale + 1) * (codebook ± 1/8), minus where `minus` is set; d is [N, 1].

    A flag of `minus` [N, s] is for 256 / s values.
    """
    shift = np.where(minus, np.float32(-0.125), np.float32(0.125))  # [N, s]
    values = _BOOKS["IQ1"][index].reshape(*shift.shape, -1) + shift[:, :, None]
    _put(d * (np.float32(2) * scales.astype(np.float32) + np.float32(1)), values, out)


def _iq1_s(b: Blocks, out: F32) -> None:
    """A word per 32 values: 3 high bits of 4 indices, 3 bits of scale, the sign of the shift."""
    high = b["qh"]
    index = b["qs"] | _split(high, 3, 4) << 8
    _iq1(b["d"].astype(np.float32)[:, None], high >> 12 & 7, index, high >> 15, out)


def _iq1_m(b: Blocks, out: F32) -> None:
    """Words of four 3-bit scales; their highest 4 bits together are the float16 d, lowest first."""
    d = np.bitwise_or.reduce((b["scales"] >> 12) << np.arange(0, 16, 4, dtype=np.uint16), axis=1)
    high = _split(b["qh"], 4, 2)  # [N, 32]
    index = b["qs"] | (high & 7).astype(np.uint16) << 8
    _iq1(d.view(np.float16).astype(np.float32)[:, None], _split(b["scales"], 3, 4), index, high >> 3, out)


I_DECODERS: dict[BlockType, Callable[[Blocks, F32], None]] = {
    BlockType.IQ2_XXS: _iq2_xxs,
    BlockType.IQ2_XS: _iq2_xs,
    BlockType.IQ2_S: _iq2_s,
    BlockType.IQ3_XXS: _iq3_xxs,
    BlockType.IQ3_S: _iq3_s,
    BlockType.IQ1_S: _iq1_s,
    BlockType.IQ1_M: _iq1_m,
}
