//! Fencing tokens as a type of their own, not mistaken for a count, a slot or a time; and the epoch, before which no
//! token is valid.

use std::fmt;

/// A fencing token: a number that orders the grants of a lease.
///
/// Issued tokens are positive. A client may present any number, in a column or the setting; the rules check whether it
/// was issued.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct Token(i64);

impl Token {
    /// Less than every issued token, for a lease or a sequence that has had none.
    pub const BEFORE_ALL: Token = Token(0);

    /// Converts from an SQL bigint: an argument, a column or a sequence's value.
    pub const fn from_bigint(number: i64) -> Self {
        Token(number)
    }

    /// Converts to an SQL bigint.
    pub const fn bigint(self) -> i64 {
        self.0
    }
}

impl fmt::Display for Token {
    fn fmt(&self, to: &mut fmt::Formatter) -> fmt::Result {
        self.0.fmt(to)
    }
}

/// An epoch, by its minimum: the number from which the epoch's tokens were drawn. A grant without a greater token may
/// have been replaced by writes that the database has lost, so none of its tokens speaks before its holder has renewed.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct Epoch(Token);

impl Epoch {
    /// No epoch has ended yet, so the tokens of all grants speak.
    pub const FIRST: Epoch = Epoch(Token::BEFORE_ALL);
    /// A new epoch is due but has not begun, so no grant's tokens speak.
    pub const TO_BEGIN: Epoch = Epoch(Token(i64::MAX));

    /// The epoch that begins with this token.
    pub const fn at(token: Token) -> Self {
        Epoch(token)
    }

    /// The token with which the epoch began.
    pub const fn token(self) -> Token {
        self.0
    }

    /// Returns true if this latest token of a grant was drawn in the present epoch.
    #[inline]
    pub const fn includes(self, latest: Token) -> bool {
        latest.0 > self.0.0
    }
}
