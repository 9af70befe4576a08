//! The service file: sections `[name]` of lines `keyword=value`.

use super::conninfo::Pairs;
use super::environment::Environment;
use crate::failure::{Failure, Result};
use std::fs;
use std::path::PathBuf;

/// The directory of Debian's libpq. Elsewhere `PGSYSCONFDIR` has to name it.
const SYSTEM: &str = "/etc/postgresql-common";

/// Returns the settings in the section of that name, from the user's file or the system's.
pub fn find(name: &str, environment: &Environment) -> Result<Pairs> {
    let named = environment.get("PGSERVICEFILE").map(PathBuf::from);
    let own = || environment.home().map(|home| home.join(".pg_service.conf"));
    let own = own().filter(|path| named.is_none() && path.exists());
    let system = environment.get("PGSYSCONFDIR").unwrap_or(SYSTEM);
    let system = Some(PathBuf::from(system).join("pg_service.conf")).filter(|path| path.exists());
    for path in named.into_iter().chain(own).chain(system) {
        let of_file = |what: String| Failure::usage(format!("{}: {what}", path.display()));
        // A file that cannot be read is an error: the next file may have another service of the same name.
        let text = fs::read_to_string(&path).map_err(|error| of_file(error.to_string()))?;
        if let Some(pairs) = section(&text, name) {
            return pairs.map_err(|line| of_file(format!("\"{line}\" cannot be read")));
        }
    }
    Err(Failure::usage(format!("there is no service \"{name}\" in any service file")))
}

/// Returns the settings of the section, or its first malformed line. Returns None if there is no such section.
fn section<'t>(text: &'t str, name: &str) -> Option<std::result::Result<Pairs, &'t str>> {
    let lines = text.lines().map(str::trim);
    let mut lines = lines.skip_while(|line| !line.starts_with(&format!("[{name}]")));
    lines.next()?;
    let lines = lines.take_while(|line| !line.starts_with('['));
    let lines = lines.filter(|line| !line.is_empty() && !line.starts_with('#'));
    Some(lines.map(pair).collect())
}

/// Reads a line. Spaces beside the = are part of the key or the value.
fn pair(line: &str) -> std::result::Result<(String, String), &str> {
    let (key, value) = line.split_once('=').ok_or(line)?;
    Ok((key.to_owned(), value.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_section_ends_where_the_next_begins() {
        let text =
            "# all\n[a]\nhost=one\n\n[b] # x\n # more\nhost= two \nport=5433\n[c]\nhost=three\n";
        let b = section(text, "b").unwrap().unwrap();
        let pair = |key: &str, value: &str| (key.to_owned(), value.to_owned());
        assert_eq!(b, [pair("host", " two"), pair("port", "5433")]);
        assert!(section(text, "d").is_none());
        assert_eq!(section("[a]\nhost", "a").unwrap(), Err("host"));
    }
}
