//! Fencing tokens, which cannot be taken for a count, a slot or a time; and the floor below which they are silent.

use std::fmt;

/// A fencing token: a number that orders the grants of a lease.
///
/// One that was drawn is positive. A client may show any number (a row's column, a setting): whether it was
/// ever drawn is for the judge to ask.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct Token(i64);

impl Token {
    /// Less than every token that is drawn: what is known of a lease or a sequence that has had none.
    pub const BEFORE_ALL: Token = Token(0);

    /// From a bigint of SQL: an argument, a column, a sequence's value.
    pub const fn from_bigint(number: i64) -> Self {
        Token(number)
    }

    /// As a bigint of SQL.
    pub const fn bigint(self) -> i64 {
        self.0
    }
}

impl fmt::Display for Token {
    fn fmt(&self, to: &mut fmt::Formatter) -> fmt::Result {
        self.0.fmt(to)
    }
}

/// Where the latest jump of the token sequence went to. A grant whose latest token is not above it may have been
/// replaced in what the database has lost: no token of it speaks until its holder has renewed it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct Floor(Token);

impl Floor {
    /// No jump has been: every grant's tokens speak.
    pub const NONE: Floor = Floor(Token::BEFORE_ALL);
    /// A jump is due that has not been made: no grant's tokens speak.
    pub const ABOVE_ALL: Floor = Floor(Token(i64::MAX));

    /// That of a jump to this token.
    pub const fn at(token: Token) -> Self {
        Floor(token)
    }

    /// The token that the jump went to.
    pub const fn token(self) -> Token {
        self.0
    }

    /// Was the latest token of a grant drawn after the jump?
    #[inline]
    pub const fn is_below(self, latest: Token) -> bool {
        latest.0 > self.0 .0
    }
}
