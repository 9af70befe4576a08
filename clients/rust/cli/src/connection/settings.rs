//! The settings of a connection, by libpq's keywords, and what the driver makes of them.

use super::conninfo::Pairs;
use super::{passfile, service};
use crate::failure::{Failure, Result};
use nix::unistd::{User, geteuid};
use pg_fence_client::tls::{Check, MakeRustlsConnect, Trust, connector};
use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;
use tokio_postgres::Config;
use tokio_postgres::config::{
    ChannelBinding, LoadBalanceHosts, SslMode, SslNegotiation, TargetSessionAttrs,
};

/// libpq's keywords that mean something here, and the variable of each.
const KNOWN: &[(&str, &str)] = &[
    ("application_name", "PGAPPNAME"),
    ("channel_binding", "PGCHANNELBINDING"),
    ("connect_timeout", "PGCONNECT_TIMEOUT"),
    ("dbname", "PGDATABASE"),
    ("host", "PGHOST"),
    ("hostaddr", "PGHOSTADDR"),
    ("keepalives", ""),
    ("keepalives_count", ""),
    ("keepalives_idle", ""),
    ("keepalives_interval", ""),
    ("load_balance_hosts", "PGLOADBALANCEHOSTS"),
    ("options", "PGOPTIONS"),
    ("passfile", "PGPASSFILE"),
    ("password", "PGPASSWORD"),
    ("port", "PGPORT"),
    ("service", "PGSERVICE"),
    ("sslcert", "PGSSLCERT"),
    ("sslkey", "PGSSLKEY"),
    ("sslmode", "PGSSLMODE"),
    ("sslnegotiation", "PGSSLNEGOTIATION"),
    ("sslrootcert", "PGSSLROOTCERT"),
    ("target_session_attrs", "PGTARGETSESSIONATTRS"),
    ("tcp_user_timeout", ""),
    ("user", "PGUSER"),
];

/// Those that make no difference here.
const WITHOUT_EFFECT: &[&str] = &[
    "client_encoding",
    "fallback_application_name",
    "gssencmode",
    "gssdelegation",
    "gsslib",
    "krbsrvname",
    "sslcompression",
    "sslsni",
];

/// What connections are called where nobody has named them.
pub const APPLICATION_NAME: &str = "pg_fence";

/// Where servers of this machine have their sockets: Debian's place, and PostgreSQL's own.
const SOCKETS: &[&str] = &["/var/run/postgresql", "/tmp"];

/// The variables of a process.
#[derive(Debug, Clone, Default)]
pub struct Environment(HashMap<String, String>);

impl Environment {
    pub fn of_this_process() -> Environment {
        let text = |(name, value): (std::ffi::OsString, std::ffi::OsString)| {
            Some((name.into_string().ok()?, value.into_string().ok()?))
        };
        Environment(std::env::vars_os().filter_map(text).collect())
    }

    /// A variable that is empty counts as one that is not set.
    pub fn get(&self, name: &str) -> Option<&str> {
        self.0.get(name).map(String::as_str).filter(|value| !value.is_empty())
    }

    pub fn home(&self) -> Option<PathBuf> {
        let of_user = || Some(User::from_uid(geteuid()).ok()??.dir);
        self.get("HOME").map(PathBuf::from).or_else(of_user)
    }
}

/// Keywords and their values.
#[derive(Debug, Default)]
pub struct Settings {
    values: BTreeMap<String, String>,
    home: Option<PathBuf>,
}

impl Settings {
    pub fn add(&mut self, key: &str, value: &str) -> Result<()> {
        if WITHOUT_EFFECT.contains(&key) {
            return Ok(());
        }
        if !KNOWN.iter().any(|(known, _)| *known == key) {
            return Err(Failure::usage(format!("the connection setting {key} is not supported")));
        }
        self.values.insert(key.to_owned(), value.to_owned());
        Ok(())
    }

    pub fn add_all(&mut self, pairs: Pairs) -> Result<()> {
        pairs.iter().try_for_each(|(key, value)| self.add(key, value))
    }

    /// Fills in what has not been said: by the service, then the environment, then what is usual.
    pub fn complete(&mut self, environment: &Environment) -> Result<()> {
        self.home = environment.home();
        let service = self.get("service").or_else(|| environment.get("PGSERVICE"));
        if let Some(service) = service.map(str::to_owned) {
            let mut of_service = Settings::default();
            of_service.add_all(service::find(&service, environment)?)?;
            for (key, value) in of_service.values {
                self.values.entry(key).or_insert(value);
            }
        }
        for (key, variable) in KNOWN {
            if let Some(value) = environment.get(variable).filter(|_| self.get(key).is_none()) {
                self.values.insert((*key).to_owned(), value.to_owned());
            }
        }
        if self.get("user").is_none() {
            let uid = geteuid();
            let user = User::from_uid(uid).ok().flatten();
            let user = user.ok_or_else(|| Failure::usage(format!("user {uid} has no name: -U")))?;
            self.values.insert("user".to_owned(), user.name);
        }
        self.default_to("port", "5432");
        let user = self.get("user").unwrap_or_default().to_owned();
        self.default_to("dbname", &user);
        self.default_to("application_name", APPLICATION_NAME);
        if self.get("host").is_none() && self.get("hostaddr").is_none() {
            let socket = format!(".s.PGSQL.{}", self.get("port").unwrap_or_default());
            let has_it = |place: &&&str| Path::new(place).join(&socket).exists();
            let host = SOCKETS.iter().find(has_it).unwrap_or(&"localhost");
            self.values.insert("host".to_owned(), (*host).to_owned());
        }
        Ok(())
    }

    fn get(&self, key: &str) -> Option<&str> {
        self.values.get(key).map(String::as_str).filter(|value| !value.is_empty())
    }

    fn default_to(&mut self, key: &str, value: &str) {
        if self.get(key).is_none() {
            self.values.insert(key.to_owned(), value.to_owned());
        }
    }

    /// The items of a list, as hosts and ports are.
    fn list(&self, key: &str) -> Vec<&str> {
        self.get(key).map(|list| list.split(',').map(str::trim).collect()).unwrap_or_default()
    }

    fn number<T: FromStr>(&self, key: &str) -> Result<Option<T>> {
        let read = |text: &str| text.parse().map_err(|_| unfit(key, text));
        self.get(key).map(read).transpose()
    }

    fn seconds(&self, key: &str) -> Result<Option<Duration>> {
        // Zero means the system's own choice.
        Ok(self.number(key)?.filter(|seconds| *seconds > 0).map(Duration::from_secs))
    }

    fn one_of<T: Copy>(&self, key: &str, choices: &[(&str, T)]) -> Result<Option<T>> {
        let Some(text) = self.get(key) else { return Ok(None) };
        let found = choices.iter().find(|(name, _)| *name == text);
        found.map(|(_, value)| Some(*value)).ok_or_else(|| unfit(key, text))
    }

    /// What the driver connects by.
    pub fn into_config(self) -> Result<(Config, MakeRustlsConnect)> {
        let mut config = Config::new();
        config.user(self.get("user").unwrap_or_default());
        config.dbname(self.get("dbname").unwrap_or_default());
        config.application_name(self.get("application_name").unwrap_or_default());
        if let Some(options) = self.get("options") {
            config.options(options);
        }
        self.places(&mut config)?;
        self.times(&mut config)?;
        self.choices(&mut config)?;
        if let Some(password) = self.password() {
            config.password(password);
        }
        let (mode, check) = self.encryption()?;
        config.ssl_mode(mode);
        let client = self.client_certificate()?;
        let tls = connector(&check, client.as_ref().map(|(cert, key)| (&**cert, &**key)));
        Ok((config, tls.map_err(|error| Failure::usage(error.to_string()))?))
    }

    fn places(&self, config: &mut Config) -> Result<()> {
        for host in self.list("host") {
            config.host(host);
        }
        for address in self.list("hostaddr") {
            config.hostaddr(address.parse().map_err(|_| unfit("hostaddr", address))?);
        }
        for port in self.list("port") {
            let port = if port.is_empty() { "5432" } else { port };
            config.port(port.parse().map_err(|_| unfit("port", port))?);
        }
        Ok(())
    }

    fn times(&self, config: &mut Config) -> Result<()> {
        if let Some(time) = self.seconds("connect_timeout")? {
            config.connect_timeout(time);
        }
        if let Some(milliseconds) = self.number("tcp_user_timeout")? {
            config.tcp_user_timeout(Duration::from_millis(milliseconds));
        }
        if let Some(on) = self.number::<u8>("keepalives")? {
            config.keepalives(on != 0);
        }
        if let Some(time) = self.seconds("keepalives_idle")? {
            config.keepalives_idle(time);
        }
        if let Some(time) = self.seconds("keepalives_interval")? {
            config.keepalives_interval(time);
        }
        if let Some(count) = self.number("keepalives_count")? {
            config.keepalives_retries(count);
        }
        Ok(())
    }

    fn choices(&self, config: &mut Config) -> Result<()> {
        let sessions = [
            ("any", TargetSessionAttrs::Any),
            ("read-write", TargetSessionAttrs::ReadWrite),
            ("primary", TargetSessionAttrs::ReadWrite),
            ("read-only", TargetSessionAttrs::ReadOnly),
            ("standby", TargetSessionAttrs::ReadOnly),
        ];
        if let Some(wanted) = self.one_of("target_session_attrs", &sessions)? {
            config.target_session_attrs(wanted);
        }
        let order = [("disable", LoadBalanceHosts::Disable), ("random", LoadBalanceHosts::Random)];
        if let Some(order) = self.one_of("load_balance_hosts", &order)? {
            config.load_balance_hosts(order);
        }
        let binding = [
            ("disable", ChannelBinding::Disable),
            ("prefer", ChannelBinding::Prefer),
            ("require", ChannelBinding::Require),
        ];
        if let Some(binding) = self.one_of("channel_binding", &binding)? {
            config.channel_binding(binding);
        }
        let begin = [("postgres", SslNegotiation::Postgres), ("direct", SslNegotiation::Direct)];
        if let Some(begin) = self.one_of("sslnegotiation", &begin)? {
            config.ssl_negotiation(begin);
        }
        Ok(())
    }

    /// The one that was given, or of ~/.pgpass: of the first host that it knows.
    fn password(&self) -> Option<String> {
        if let Some(password) = self.get("password") {
            return Some(password.to_owned());
        }
        let of_user = || Some(self.home.as_ref()?.join(".pgpass"));
        let path = self.get("passfile").map(PathBuf::from).or_else(of_user)?;
        let (mut hosts, ports) = (self.list("host"), self.list("port"));
        if hosts.is_empty() {
            hosts = self.list("hostaddr");
        }
        let (dbname, user) = (self.get("dbname")?, self.get("user")?);
        hosts.iter().enumerate().find_map(|(at, host)| {
            let port = ports.get(at).or(ports.last()).copied().unwrap_or("5432");
            // A socket in its usual place is written as localhost there.
            let host = if SOCKETS.contains(host) { "localhost" } else { host };
            passfile::password(&path, host, port, dbname, user)
        })
    }

    fn encryption(&self) -> Result<(SslMode, Check)> {
        let own = self.in_home("root.crt").filter(|path| path.exists());
        let trust = match self.get("sslrootcert") {
            Some("system") => Some(Trust::System),
            Some(path) => Some(Trust::File(PathBuf::from(path))),
            None => own.map(Trust::File),
        };
        let usual =
            if self.get("sslrootcert") == Some("system") { "verify-full" } else { "prefer" };
        let mode = self.get("sslmode").unwrap_or(usual);
        let needed = || {
            let how = format!("sslmode={mode} needs ~/.postgresql/root.crt or sslrootcert=…");
            trust.clone().ok_or_else(|| Failure::usage(how))
        };
        Ok(match mode {
            "disable" => (SslMode::Disable, Check::Nothing),
            // Not first without, as libpq does for `allow`: encrypted where the server can.
            "allow" | "prefer" => (SslMode::Prefer, Check::Nothing),
            // As libpq does: where a root certificate is at hand, it is used.
            "require" => (SslMode::Require, trust.map_or(Check::Nothing, Check::Issuer)),
            "verify-ca" => (SslMode::Require, Check::Issuer(needed()?)),
            "verify-full" => (SslMode::Require, Check::IssuerAndName(needed()?)),
            _ => return Err(unfit("sslmode", mode)),
        })
    }

    fn client_certificate(&self) -> Result<Option<(PathBuf, PathBuf)>> {
        let place = |key: &str, usual: &str| {
            self.get(key).map(PathBuf::from).or_else(|| self.in_home(usual))
        };
        let cert = place("sslcert", "postgresql.crt").filter(|path| path.exists());
        let key = place("sslkey", "postgresql.key").filter(|path| path.exists());
        match (cert, key, self.get("sslcert")) {
            (Some(cert), Some(key), _) => Ok(Some((cert, key))),
            (_, _, None) => Ok(None),
            (_, _, Some(named)) => {
                Err(Failure::usage(format!("{named}, or its key, does not exist")))
            }
        }
    }

    fn in_home(&self, name: &str) -> Option<PathBuf> {
        Some(self.home.as_ref()?.join(".postgresql").join(name))
    }
}

fn unfit(key: &str, value: &str) -> Failure {
    Failure::usage(format!("\"{value}\" is no value for the connection setting {key}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::PermissionsExt;
    use tokio_postgres::config::Host;

    fn environment(variables: &[(&str, &str)]) -> Environment {
        let owned = |(name, value): &(&str, &str)| ((*name).to_owned(), (*value).to_owned());
        Environment(variables.iter().map(owned).collect())
    }

    fn settings(said: &str, variables: &[(&str, &str)]) -> Settings {
        let mut settings = Settings::default();
        settings.add_all(super::super::conninfo::parse(said).unwrap()).unwrap();
        settings.complete(&environment(variables)).unwrap();
        settings
    }

    /// A home directory of a test's own.
    struct Home(PathBuf);

    impl Home {
        fn new(name: &str) -> Home {
            let path = std::env::temp_dir().join(format!("pg_fence-{name}-{}", std::process::id()));
            fs::create_dir_all(&path).unwrap();
            Home(path)
        }

        fn put(&self, name: &str, text: &str) -> String {
            let path = self.0.join(name);
            fs::write(&path, text).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
            path.display().to_string()
        }
    }

    impl Drop for Home {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn what_is_said_goes_before_the_service_and_that_before_the_environment() {
        let home = Home::new("order");
        let file = home.put("services", "[shop]\nhost=service\nport=5433\n");
        let variables =
            [("PGSERVICEFILE", &*file), ("PGHOST", "variable"), ("PGPORT", "1"), ("PGUSER", "me")];
        let found = settings("service=shop host=said", &variables);
        assert_eq!(found.get("host"), Some("said"));
        assert_eq!(found.get("port"), Some("5433"));
        assert_eq!(found.get("user"), Some("me"));
        assert_eq!(found.get("dbname"), Some("me"));
    }

    #[test]
    fn hosts_ports_and_times_reach_the_driver() {
        let said =
            "host=a,/tmp port=5433,5434 user=me connect_timeout=7 target_session_attrs=primary";
        let (config, _) = settings(said, &[]).into_config().unwrap();
        assert_eq!(config.get_hosts()[0], Host::Tcp("a".to_owned()));
        assert_eq!(config.get_hosts()[1], Host::Unix("/tmp".into()));
        assert_eq!(config.get_ports(), [5433, 5434]);
        assert_eq!(config.get_connect_timeout(), Some(&Duration::from_secs(7)));
        assert_eq!(config.get_target_session_attrs(), TargetSessionAttrs::ReadWrite);
    }

    #[test]
    fn a_password_comes_from_the_file_unless_others_may_read_it() {
        let home = Home::new("passwords");
        let file = home.put(".pgpass", "db:*:shop:me:secret\n");
        let variables = [("HOME", home.0.to_str().unwrap())];
        let found = || settings("host=db dbname=shop user=me", &variables).password();
        assert_eq!(found().as_deref(), Some("secret"));
        fs::set_permissions(file, fs::Permissions::from_mode(0o644)).unwrap();
        assert_eq!(found(), None);
    }

    #[test]
    fn verification_needs_something_to_verify_by() {
        let home = Home::new("tls");
        let variables = [("HOME", home.0.to_str().unwrap())];
        let mode = |said: &str| settings(&format!("user=me {said}"), &variables).encryption();
        assert_eq!(mode("").unwrap(), (SslMode::Prefer, Check::Nothing));
        assert_eq!(mode("sslmode=require").unwrap(), (SslMode::Require, Check::Nothing));
        assert!(mode("sslmode=verify-full").is_err());
        assert!(mode("sslmode=perhaps").is_err());
        let system = (SslMode::Require, Check::IssuerAndName(Trust::System));
        assert_eq!(mode("sslrootcert=system").unwrap(), system);
    }

    #[test]
    fn what_is_not_supported_is_refused() {
        let add = |key: &str| Settings::default().add(key, "x");
        assert!(add("gssencmode").is_ok());
        assert!(add("sslcrl").is_err());
        assert!(add("hots").is_err());
    }
}
