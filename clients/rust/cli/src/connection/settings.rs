//! The settings of a connection, by libpq's keywords, and their conversion to those of the driver.

use super::conninfo::Pairs;
use super::environment::Environment;
use super::parameters::{self, Meaning, Parameter};
use super::tls::{Check, Trust, connector};
use super::{passfile, service};
use crate::failure::{Failure, Result};
use nix::unistd::{User, geteuid};
use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;
use tokio_postgres::Config;
use tokio_postgres::config::{SslMode, TargetSessionAttrs};
use tokio_postgres_rustls::MakeRustlsConnect;

/// The default application name.
pub const APPLICATION_NAME: &str = "pg_fence";

/// Returns the directory of the sockets of this machine's servers: that of the packages if it exists, else PostgreSQL's
/// default. The program does not look for a socket, because anybody can make one in /tmp while the server is down.
fn sockets() -> &'static str {
    const OF_PACKAGES: &str = "/var/run/postgresql";
    if Path::new(OF_PACKAGES).is_dir() { OF_PACKAGES } else { "/tmp" }
}

/// The settings of which an empty value is an error. An empty value of any other setting means the default, whatever the
/// environment says.
const NEVER_EMPTY: &[&str] = &[
    "service",
    "channel_binding",
    "connect_timeout",
    "gssencmode",
    "keepalives",
    "keepalives_count",
    "keepalives_idle",
    "keepalives_interval",
    "load_balance_hosts",
    "sslcertmode",
    "sslmode",
    "sslnegotiation",
    "target_session_attrs",
    "tcp_user_timeout",
];

/// The values of target_session_attrs. `prefer-standby` is refused, because leases are granted by a primary.
const SESSIONS: &[(&str, TargetSessionAttrs)] = &[
    ("any", TargetSessionAttrs::Any),
    ("read-write", TargetSessionAttrs::ReadWrite),
    ("primary", TargetSessionAttrs::ReadWrite),
    ("read-only", TargetSessionAttrs::ReadOnly),
    ("standby", TargetSessionAttrs::ReadOnly),
];

/// Keywords and their values.
#[derive(Debug, Default)]
pub struct Settings {
    values: BTreeMap<&'static str, String>,
    home: Option<PathBuf>,
}

impl Settings {
    pub fn add(&mut self, key: &str, value: &str) -> Result<()> {
        self.values.insert(known(key)?, value.to_owned());
        Ok(())
    }

    pub fn add_all(&mut self, pairs: Pairs) -> Result<()> {
        pairs.iter().try_for_each(|(key, value)| self.add(key, value))
    }

    /// Adds missing settings from the service, then from the environment, then the defaults.
    pub fn complete(&mut self, environment: &Environment) -> Result<()> {
        self.home = environment.home();
        let service = self.values.get("service").map(String::as_str);
        if let Some(service) = service.or_else(|| environment.get("PGSERVICE")).map(str::to_owned) {
            for (key, value) in service::find(&service, environment)? {
                if key == "service" {
                    let nested = format!(
                        "the service \"{service}\" names another one: that is not supported"
                    );
                    return Err(Failure::usage(nested));
                }
                // If two lines have the same key, the first counts.
                self.default_to(known(&key)?, &value);
            }
        }
        for parameter in parameters::ALL {
            if let Some(value) = environment.get(parameter.variable) {
                self.default_to(parameter.keyword, value);
            }
        }
        if environment.get("PGREQUIRESSL").is_some_and(|value| value.starts_with('1')) {
            self.default_to("sslmode", "require");
        }
        self.refuse_what_cannot_be_kept()?;
        for key in NEVER_EMPTY {
            if self.values.get(key).is_some_and(String::is_empty) {
                return Err(unfit(key, ""));
            }
        }
        if self.get("user").is_none() {
            let uid = geteuid();
            let user = User::from_uid(uid).ok().flatten();
            let user = user.ok_or_else(|| Failure::usage(format!("user {uid} has no name: -U")))?;
            self.values.insert("user", user.name);
        }
        let fallback = self.get("fallback_application_name").unwrap_or(APPLICATION_NAME);
        let usual =
            [("dbname", self.get("user").unwrap_or_default()), ("application_name", fallback)];
        for (key, value) in usual.map(|(key, value)| (key, value.to_owned())) {
            if self.get(key).is_none() {
                self.values.insert(key, value);
            }
        }
        Ok(())
    }

    fn refuse_what_cannot_be_kept(&self) -> Result<()> {
        for parameter in parameters::ALL {
            let Some(value) = self.get(parameter.keyword) else { continue };
            let said = match parameter.meaning {
                Meaning::Used | Meaning::Driver | Meaning::Ignored => continue,
                Meaning::Only(values) if values.contains(&value) => continue,
                Meaning::Only(_) => format!("{}={value}", parameter.keyword),
                // The value is not shown, because it may be a secret.
                Meaning::Refused => parameter.keyword.to_owned(),
            };
            let variable = match parameter.variable {
                "" => String::new(),
                variable => format!(" ({variable})"),
            };
            let refused = format!("the connection setting {said}{variable} is not supported");
            return Err(Failure::usage(refused));
        }
        Ok(())
    }

    /// The value, if it is not empty.
    fn get(&self, key: &str) -> Option<&str> {
        self.values.get(key).map(String::as_str).filter(|value| !value.is_empty())
    }

    /// Adds the setting if it is missing. An empty value is not missing.
    fn default_to(&mut self, key: &'static str, value: &str) {
        self.values.entry(key).or_insert_with(|| value.to_owned());
    }

    /// Returns the items of a list, such as the hosts and ports.
    fn list(&self, key: &str) -> Vec<&str> {
        self.get(key).map(|list| list.split(',').collect()).unwrap_or_default()
    }

    fn number<T: FromStr>(&self, key: &str) -> Result<Option<T>> {
        let read = |text: &str| text.parse().map_err(|_| unfit(key, text));
        self.get(key).map(read).transpose()
    }

    fn one_of<T: Copy>(&self, key: &str, choices: &[(&str, T)]) -> Result<Option<T>> {
        let Some(text) = self.get(key) else { return Ok(None) };
        let found = choices.iter().find(|(name, _)| *name == text);
        found.map(|(_, value)| Some(*value)).ok_or_else(|| unfit(key, text))
    }

    /// Returns the driver's settings for each place, in the order in which they are tried, and the encryption.
    pub fn into_configs(self) -> Result<(Vec<Config>, MakeRustlsConnect)> {
        let (mode, check) = self.encryption()?;
        let client = self.client_certificate()?;
        let client = client.as_ref().map(|(cert, key)| (&**cert, &**key));
        // Versions older than 1.2 are never used.
        let least = [("TLSv1", false), ("TLSv1.1", false), ("TLSv1.2", false), ("TLSv1.3", true)];
        let is_only_13 = self.one_of("ssl_min_protocol_version", &least)? == Some(true);
        let tls = connector(&check, client, is_only_13)?;
        let mut configs = Vec::new();
        for place in self.places()? {
            let mut config = self.at(&place)?;
            // A socket of this machine is never encrypted.
            let is_socket = place.address.is_none() && place.host.starts_with('/');
            config.ssl_mode(if is_socket { SslMode::Disable } else { mode });
            configs.push(config);
        }
        Ok((configs, tls))
    }

    /// Returns the driver's settings for a place. The driver parses most of them itself.
    fn at(&self, place: &Place) -> Result<Config> {
        let is_its = |one: &&Parameter| matches!(one.meaning, Meaning::Driver);
        let its = parameters::ALL.iter().filter(is_its).map(|one| one.keyword);
        let password = self.password(place);
        let of_place = [
            ("host", Some(&*place.host)),
            ("hostaddr", place.address.as_deref()),
            ("port", Some(&*place.port)),
            ("password", password.as_deref()),
        ];
        let mut all = String::new();
        for (keyword, value) in its.map(|keyword| (keyword, self.get(keyword))).chain(of_place) {
            let Some(value) = value else { continue };
            let quoted = value.replace('\\', r"\\").replace('\'', r"\'");
            let setting = format!("{keyword}='{quoted}' ");
            setting.parse::<Config>().map_err(|_| unfit(keyword, value))?;
            all += &setting;
        }
        let config = all.parse::<Config>();
        let mut config = config.map_err(|error| Failure::system("the settings", error))?;
        // The driver would read this number as seconds.
        if let Some(milliseconds) = self.number("tcp_user_timeout")? {
            config.tcp_user_timeout(Duration::from_millis(milliseconds));
        }
        if let Some(count) = self.number("keepalives_count")? {
            config.keepalives_retries(count);
        }
        if let Some(wanted) = self.one_of("target_session_attrs", SESSIONS)? {
            config.target_session_attrs(wanted);
        }
        Ok(config)
    }

    /// Returns the places. Hosts, addresses and ports belong together by their positions in the lists.
    fn places(&self) -> Result<Vec<Place>> {
        let (hosts, addresses) = (self.list("host"), self.list("hostaddr"));
        let ports = self.list("port");
        let count = hosts.len().max(addresses.len()).max(1);
        let fits = |list: &[&str], one_for_all: bool| {
            list.is_empty() || list.len() == count || one_for_all && list.len() == 1
        };
        if !fits(&hosts, false) || !fits(&addresses, false) || !fits(&ports, true) {
            return Err(Failure::usage("there are not as many ports, hosts and addresses"));
        }
        let given = |list: &[&str], at: usize| {
            let text = if list.len() == 1 { list.first() } else { list.get(at) };
            text.copied().filter(|text| !text.is_empty()).map(str::to_owned)
        };
        let mut places = Vec::new();
        for at in 0..count {
            let port = given(&ports, at).unwrap_or_else(|| "5432".to_owned());
            let port = port.trim().to_owned();
            if port.parse() == Ok(0) {
                return Err(unfit("port", &port));
            }
            let address = given(&addresses, at);
            let host = given(&hosts, at).or_else(|| address.clone());
            let host = host.unwrap_or_else(|| sockets().to_owned());
            // The driver would resolve the first as a host name, and drop the zone of the second.
            if host.starts_with('@') || host.contains('%') && !host.starts_with('/') {
                let what = "an abstract socket or the zone of an IPv6 address is not supported";
                return Err(Failure::usage(format!("\"{host}\": {what}")));
            }
            places.push(Place { host, address, port });
        }
        Ok(places)
    }

    /// Returns the password of the settings, or that of ~/.pgpass.
    fn password(&self, place: &Place) -> Option<String> {
        if let Some(password) = self.get("password") {
            return Some(password.to_owned());
        }
        let of_user = || Some(self.home.as_ref()?.join(".pgpass"));
        let path = self.get("passfile").map(PathBuf::from).or_else(of_user)?;
        let (dbname, user) = (self.get("dbname")?, self.get("user")?);
        // In that file a socket in the default directory is named localhost.
        let host = if place.host == sockets() { "localhost" } else { &place.host };
        passfile::password(&path, host, &place.port, dbname, user)
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
        let is_weak = match mode {
            "disable" | "allow" | "prefer" => self.get("sslnegotiation") == Some("direct"),
            _ => false,
        };
        if is_weak || trust == Some(Trust::System) && mode != "verify-full" {
            let why = if is_weak { "sslnegotiation=direct" } else { "sslrootcert=system" };
            return Err(Failure::usage(format!("sslmode={mode} is too weak for {why}")));
        }
        let revoked = self.in_home("root.crl").filter(|path| path.exists());
        if let (Some(path), true) = (revoked, trust.is_some() && mode != "disable") {
            let path = path.display();
            return Err(Failure::usage(format!(
                "{path}: the connection setting sslcrl is not supported"
            )));
        }
        let needed = || {
            let how = format!("sslmode={mode} needs ~/.postgresql/root.crt or sslrootcert=…");
            trust.clone().ok_or_else(|| Failure::usage(how))
        };
        Ok(match mode {
            "disable" => (SslMode::Disable, Check::Nothing),
            // libpq first tries `allow` without encryption. This program encrypts if the server can.
            "allow" | "prefer" => (SslMode::Prefer, Check::Nothing),
            // As in libpq, a root certificate is used if there is one.
            "require" => (SslMode::Require, trust.map_or(Check::Nothing, Check::Issuer)),
            "verify-ca" => (SslMode::Require, Check::Issuer(needed()?)),
            "verify-full" => (SslMode::Require, Check::IssuerAndName(needed()?)),
            _ => return Err(unfit("sslmode", mode)),
        })
    }

    fn client_certificate(&self) -> Result<Option<(PathBuf, PathBuf)>> {
        let modes = [("disable", false), ("allow", true)];
        if self.one_of("sslcertmode", &modes)? == Some(false) {
            return Ok(None);
        }
        let place = |key: &str, usual: &str| {
            self.get(key).map(PathBuf::from).or_else(|| self.in_home(usual))
        };
        let cert = place("sslcert", "postgresql.crt").filter(|path| path.exists());
        let key = place("sslkey", "postgresql.key").filter(|path| path.exists());
        match (cert, key, self.get("sslcert")) {
            (Some(cert), Some(key), _) => {
                is_private(&key)?;
                Ok(Some((cert, key)))
            }
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

/// A host to connect to. A host name may have several addresses.
#[derive(Debug, PartialEq, Eq)]
struct Place {
    /// The host name, or the directory of the socket.
    host: String,
    address: Option<String>,
    port: String,
}

/// Fails if others may read the key, as libpq does. A key of root may be readable for its group.
fn is_private(key: &Path) -> Result<()> {
    let metadata =
        fs::metadata(key).map_err(|error| Failure::usage(format!("{}: {error}", key.display())))?;
    let forbidden = if metadata.uid() == 0 { 0o037 } else { 0o077 };
    match metadata.mode() & forbidden {
        0 => Ok(()),
        _ => {
            Err(Failure::usage(format!("{}: others may read this key (chmod 600)", key.display())))
        }
    }
}

fn known(key: &str) -> Result<&'static str> {
    let parameter = parameters::of(key);
    let parameter =
        parameter.ok_or_else(|| Failure::usage(format!("{key} is no connection setting")));
    Ok(parameter?.keyword)
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

    /// The home directory of one test.
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
    fn options_have_precedence_over_the_service_and_that_over_the_environment() {
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
    fn a_service_that_names_another_one_is_refused() {
        let home = Home::new("nested");
        let file = home.put("services", "[shop]\nservice=other\n[other]\nhost=db\n");
        let found = Settings::default().complete(&environment(&[
            ("PGSERVICEFILE", &*file),
            ("PGSERVICE", "shop"),
            ("PGUSER", "me"),
        ]));
        assert!(found.unwrap_err().message.contains("names another one"));
    }

    #[test]
    fn hosts_ports_and_times_reach_the_driver() {
        let said = r"host=a,/tmp port=5433,5434 user='it\'s \\ me' connect_timeout=7
                     target_session_attrs=primary tcp_user_timeout=1500";
        let (configs, _) = settings(said, &[]).into_configs().unwrap();
        let [first, second] = configs.as_slice() else { panic!("{configs:?}") };
        assert_eq!(first.get_hosts(), [Host::Tcp("a".to_owned())]);
        assert_eq!(second.get_hosts(), [Host::Unix("/tmp".into())]);
        assert_eq!((first.get_ports(), second.get_ports()), (&[5433][..], &[5434][..]));
        assert_eq!(second.get_user(), Some(r"it's \ me"));
        assert_eq!(second.get_connect_timeout(), Some(&Duration::from_secs(7)));
        assert_eq!(second.get_tcp_user_timeout(), Some(&Duration::from_millis(1500)));
        assert_eq!(second.get_target_session_attrs(), TargetSessionAttrs::ReadWrite);
        let (configs, _) =
            settings("postgres://a,b?connect_timeout=-1&user=me", &[]).into_configs().unwrap();
        assert_eq!(configs[1].get_ports(), [5432]);
        assert_eq!(configs[1].get_connect_timeout(), None);
        assert!(settings("host=a,b port=1,2,3", &[]).into_configs().is_err());
    }

    #[test]
    fn a_password_comes_from_the_file_unless_others_may_read_it() {
        let home = Home::new("passwords");
        let file = home.put(".pgpass", "db:*:shop:me:secret\n*:5433:shop:me:other\n");
        let variables = [("HOME", home.0.to_str().unwrap())];
        let found = || {
            let settings = settings("host=db,two port=5432,5433 dbname=shop user=me", &variables);
            let places = settings.places().unwrap();
            places.iter().map(|place| settings.password(place)).collect::<Vec<_>>()
        };
        assert_eq!(found(), [Some("secret".to_owned()), Some("other".to_owned())]);
        fs::set_permissions(file, fs::Permissions::from_mode(0o644)).unwrap();
        assert_eq!(found(), [None, None]);
    }

    #[test]
    fn verification_needs_a_root_certificate() {
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

    /// Sets each of libpq's parameters, by its keyword and by its variable, to an accepted and to a refused value.
    #[test]
    fn what_is_not_supported_is_refused_by_its_name() {
        for parameter in parameters::ALL {
            let (keyword, variable) = (parameter.keyword, parameter.variable);
            let (taken, refused) = match parameter.meaning {
                Meaning::Used | Meaning::Driver => continue,
                Meaning::Ignored => (Some("x"), None),
                Meaning::Only(values) => (values.first().copied(), Some("require")),
                Meaning::Refused => (None, Some("x")),
            };
            let tried = |value: &str| {
                let mut settings = Settings::default();
                settings.add(keyword, value).unwrap();
                let said = settings.complete(&environment(&[]));
                let set: &[_] = if variable.is_empty() { &[] } else { &[(variable, value)] };
                let variables = environment(set);
                [said, Settings::default().complete(&variables)]
            };
            if let Some(value) = taken {
                assert!(tried(value).iter().all(Result::is_ok), "{keyword}={value}");
            }
            let Some(value) = refused else { continue };
            let [by_keyword, by_variable] = tried(value);
            assert!(by_keyword.unwrap_err().message.contains(keyword));
            if !variable.is_empty() {
                assert!(by_variable.unwrap_err().message.contains(variable));
            }
        }
        assert!(Settings::default().add("hots", "x").is_err());
    }

    /// Values that libpq obeys or refuses, and that must not be ignored here.
    #[test]
    fn what_is_used_is_kept_or_refused() {
        let home = Home::new("kept");
        let variables = [("HOME", home.0.to_str().unwrap())];
        let refused = |said: &str| settings(said, &variables).into_configs().is_err();
        for said in [
            "sslcertmode=require",
            "connect_timeout=soon",
            "ssl_min_protocol_version=TLSv1.4",
            "sslrootcert=system sslmode=require",
            "sslnegotiation=direct",
            "sslmode=perhaps",
            "channel_binding=perhaps",
            "target_session_attrs=prefer-standby",
            "load_balance_hosts=perhaps",
            "hostaddr=perhaps",
        ] {
            assert!(refused(said), "{said}");
        }
        let of_old = [("PGREQUIRESSL", "1")];
        assert_eq!(settings("", &of_old).encryption().unwrap().0, SslMode::Require);
        // A key that others may read, and a list of certificates that were revoked.
        let (cert, key) = (home.put("cert", "x"), home.put("key", "x"));
        fs::set_permissions(&key, fs::Permissions::from_mode(0o644)).unwrap();
        let of_client = |mode: &str| {
            let said = format!("sslcert={cert} sslkey={key} sslcertmode={mode}");
            settings(&said, &variables).client_certificate()
        };
        assert!(of_client("allow").unwrap_err().message.contains("chmod"));
        assert_eq!(of_client("disable").unwrap(), None);
        fs::create_dir_all(home.0.join(".postgresql")).unwrap();
        home.put(".postgresql/root.crt", "x");
        home.put(".postgresql/root.crl", "x");
        let with_list = settings("sslmode=verify-ca", &variables).encryption();
        assert!(with_list.unwrap_err().message.contains("sslcrl"));
    }
}
