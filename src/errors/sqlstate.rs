//! The SQLSTATEs of all refusals and warnings: those of the fence, and PostgreSQL's own under the names that its manual
//! gives them.

macro_rules! sqlstates {
    ($($(#[doc = $what:literal])+ $name:ident = $code:literal,)*) => {
        /// Why something is refused, for programs.
        #[derive(Clone, Copy, PartialEq, Eq, Debug)]
        pub enum SqlState {
            $(
                #[doc = concat!($code, ":")]
                $(#[doc = $what])+
                $name,
            )*
        }

        impl SqlState {
            /// Its five characters.
            pub const fn code(self) -> &'static str {
                match self {
                    $(SqlState::$name => $code,)*
                }
            }
        }
    };
}

sqlstates! {
    /// the row has seen the same token or a greater one.
    StaleToken = "PF001",
    /// no token was presented, or NULL.
    NoToken = "PF002",
    /// the token was never issued by this database.
    TokenNeverIssued = "PF003",
    /// the token does not speak for the lease.
    TokenDoesNotSpeak = "PF004",
    /// the statement cannot be fenced.
    CannotBeFenced = "PF005",
    /// the row is held, and its token was not presented.
    RowIsHeld = "PF006",
    /// a warning.
    Warning = "01000",
    /// a transaction that cannot be prepared.
    FeatureNotSupported = "0A000",
    /// NULL where a value is needed.
    NullValueNotAllowed = "22004",
    /// a value out of its range.
    InvalidParameterValue = "22023",
    /// a warning: what needs an open transaction was called outside of one.
    NoActiveSqlTransaction = "25P01",
    /// a trigger that is put where it cannot work.
    TriggerProtocolViolated = "39P01",
    /// a retry of the transaction helps.
    SerializationFailure = "40001",
    /// the caller's role may not.
    InsufficientPrivilege = "42501",
    /// the table has no such column.
    UndefinedColumn = "42703",
    /// a column is of a type that does not fit.
    DatatypeMismatch = "42804",
    /// no memory, or no room in the server's lock table.
    OutOfMemory = "53200",
    /// something is not in the state that the call needs.
    ObjectNotInPrerequisiteState = "55000",
    /// maintenance has what the call needs.
    ObjectInUse = "55006",
    /// a wait was longer than `lock_timeout`; or a lock is not to be had at once.
    LockNotAvailable = "55P03",
    /// a file could not be read.
    IoError = "58030",
    /// a page was damaged.
    DataCorrupted = "XX001",
    /// a panic: a bug of pg_fence.
    InternalError = "XX000",
}
