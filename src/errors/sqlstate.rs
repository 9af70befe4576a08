//! The SQLSTATEs of all errors and warnings: those of the fence, and PostgreSQL's under the names in its manual.

macro_rules! sqlstates {
    ($($(#[doc = $what:literal])+ $name:ident = $code:literal,)*) => {
        /// The kind of an error, for programs.
        #[derive(Clone, Copy, PartialEq, Eq, Debug)]
        pub enum SqlState {
            $(
                #[doc = concat!($code, ":")]
                $(#[doc = $what])+
                $name,
            )*
        }

        impl SqlState {
            /// The five characters of the SQLSTATE.
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
    /// a general warning.
    Warning = "01000",
    /// the transaction cannot be prepared.
    FeatureNotSupported = "0A000",
    /// a needed value is NULL.
    NullValueNotAllowed = "22004",
    /// a value is out of its range.
    InvalidParameterValue = "22023",
    /// a warning: a call that needs a transaction block was outside of one.
    NoActiveSqlTransaction = "25P01",
    /// the trigger cannot work in this place.
    TriggerProtocolViolated = "39P01",
    /// a retry of the transaction helps.
    SerializationFailure = "40001",
    /// the caller's role lacks the right.
    InsufficientPrivilege = "42501",
    /// the table has no such column.
    UndefinedColumn = "42703",
    /// a column has an unsuitable type.
    DatatypeMismatch = "42804",
    /// no memory, or no room in the server's lock table.
    OutOfMemory = "53200",
    /// an object is not in the state that the call needs.
    ObjectNotInPrerequisiteState = "55000",
    /// maintenance has locked the table.
    ObjectInUse = "55006",
    /// a wait exceeded `lock_timeout`, or a lock that is not waited for is held.
    LockNotAvailable = "55P03",
    /// a file could not be read.
    IoError = "58030",
    /// a page is damaged.
    DataCorrupted = "XX001",
    /// a panic, so a bug of pg_fence.
    InternalError = "XX000",
}
