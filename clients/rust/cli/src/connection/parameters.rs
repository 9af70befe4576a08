//! Every parameter of libpq 18, and how this program treats it. A parameter that it could not obey is refused by name.

use Meaning::{Driver, Ignored, Only, Refused, Used};

#[derive(Debug, Clone, Copy)]
pub enum Meaning {
    /// Read by [`Settings`](super::settings::Settings).
    Used,
    /// Read by the driver, as libpq reads it.
    Driver,
    /// Has no effect in this program, and its absence removes no protection.
    Ignored,
    /// These values are accepted, because they require nothing. Others are refused.
    Only(&'static [&'static str]),
    Refused,
}

#[derive(Debug)]
pub struct Parameter {
    pub keyword: &'static str,
    /// The environment variable, or empty if there is none.
    pub variable: &'static str,
    pub meaning: Meaning,
}

const fn parameter(keyword: &'static str, variable: &'static str, meaning: Meaning) -> Parameter {
    Parameter { keyword, variable, meaning }
}

pub fn of(keyword: &str) -> Option<&'static Parameter> {
    ALL.iter().find(|parameter| parameter.keyword == keyword)
}

/// All parameters, in the order of `PQconndefaults`.
pub const ALL: &[Parameter] = &[
    parameter("service", "PGSERVICE", Used),
    parameter("user", "PGUSER", Driver),
    parameter("password", "PGPASSWORD", Used),
    parameter("passfile", "PGPASSFILE", Used),
    parameter("channel_binding", "PGCHANNELBINDING", Driver),
    parameter("connect_timeout", "PGCONNECT_TIMEOUT", Driver),
    parameter("dbname", "PGDATABASE", Driver),
    parameter("host", "PGHOST", Used),
    parameter("hostaddr", "PGHOSTADDR", Used),
    parameter("port", "PGPORT", Used),
    // The program always uses UTF-8.
    parameter("client_encoding", "PGCLIENTENCODING", Ignored),
    parameter("options", "PGOPTIONS", Driver),
    parameter("application_name", "PGAPPNAME", Driver),
    parameter("fallback_application_name", "", Used),
    parameter("keepalives", "", Driver),
    parameter("keepalives_idle", "", Driver),
    parameter("keepalives_interval", "", Driver),
    parameter("keepalives_count", "", Used),
    parameter("tcp_user_timeout", "", Used),
    parameter("sslmode", "PGSSLMODE", Used),
    parameter("sslnegotiation", "PGSSLNEGOTIATION", Driver),
    // libpq does not compress either with a recent OpenSSL.
    parameter("sslcompression", "PGSSLCOMPRESSION", Ignored),
    parameter("sslcert", "PGSSLCERT", Used),
    parameter("sslkey", "PGSSLKEY", Used),
    parameter("sslcertmode", "PGSSLCERTMODE", Used),
    parameter("sslpassword", "", Refused),
    parameter("sslrootcert", "PGSSLROOTCERT", Used),
    parameter("sslcrl", "PGSSLCRL", Refused),
    parameter("sslcrldir", "PGSSLCRLDIR", Refused),
    parameter("sslsni", "PGSSLSNI", Only(&["1"])),
    parameter("requirepeer", "PGREQUIREPEER", Refused),
    parameter("require_auth", "PGREQUIREAUTH", Refused),
    parameter("min_protocol_version", "PGMINPROTOCOLVERSION", Only(&["3.0"])),
    parameter("max_protocol_version", "PGMAXPROTOCOLVERSION", Only(&["3.0", "3.2", "latest"])),
    parameter("ssl_min_protocol_version", "PGSSLMINPROTOCOLVERSION", Used),
    parameter("ssl_max_protocol_version", "PGSSLMAXPROTOCOLVERSION", Only(&["TLSv1.3"])),
    // Kerberos is never used, neither for encryption nor for authentication.
    parameter("gssencmode", "PGGSSENCMODE", Only(&["disable", "prefer"])),
    parameter("krbsrvname", "PGKRBSRVNAME", Ignored),
    parameter("gsslib", "PGGSSLIB", Ignored),
    parameter("gssdelegation", "PGGSSDELEGATION", Ignored),
    parameter("replication", "", Only(&["false", "off", "no", "0"])),
    parameter("target_session_attrs", "PGTARGETSESSIONATTRS", Used),
    parameter("load_balance_hosts", "PGLOADBALANCEHOSTS", Driver),
    parameter("scram_client_key", "", Refused),
    parameter("scram_server_key", "", Refused),
    parameter("oauth_issuer", "", Refused),
    parameter("oauth_client_id", "", Refused),
    parameter("oauth_client_secret", "", Refused),
    parameter("oauth_scope", "", Refused),
    parameter("sslkeylogfile", "", Refused),
];
