//! Connection strings: `host=… dbname=…` and `postgresql://…`, as libpq reads them.

use crate::failure::{Failure, Result};
use percent_encoding::percent_decode_str;

/// Keywords and values, in the order of the string.
pub type Pairs = Vec<(String, String)>;

/// Whether it is a connection string, and not the mere name of a database.
pub fn is_one(text: &str) -> bool {
    is_url(text) || text.contains('=')
}

fn is_url(text: &str) -> bool {
    text.starts_with("postgresql://") || text.starts_with("postgres://")
}

pub fn parse(text: &str) -> Result<Pairs> {
    match text.split_once("://") {
        Some((_, rest)) if is_url(text) => url(rest),
        _ => keywords(text),
    }
}

fn malformed(what: &str) -> Failure {
    Failure::usage(format!("the connection string cannot be read: {what}"))
}

/// `key = value`, where a value with spaces is in single quotes and `\` takes the next character as it is.
fn keywords(text: &str) -> Result<Pairs> {
    let mut pairs = Vec::new();
    let mut rest = text.trim_start();
    while !rest.is_empty() {
        let (key, value) =
            rest.split_once('=').ok_or_else(|| malformed(&format!("no = after \"{rest}\"")))?;
        let key = key.trim();
        if key.is_empty() || key.contains(char::is_whitespace) {
            return Err(malformed(&format!("\"{key}\" is no keyword")));
        }
        let (value, after) = value_of(value.trim_start())?;
        pairs.push((key.to_owned(), value));
        rest = after.trim_start();
    }
    Ok(pairs)
}

fn value_of(text: &str) -> Result<(String, &str)> {
    let (is_quoted, text) = match text.strip_prefix('\'') {
        Some(inner) => (true, inner),
        None => (false, text),
    };
    let mut value = String::new();
    let mut characters = text.char_indices();
    while let Some((at, character)) = characters.next() {
        match character {
            '\\' => value.extend(characters.next().map(|(_, next)| next)),
            '\'' if is_quoted => return Ok((value, &text[at + 1..])),
            _ if character.is_whitespace() && !is_quoted => return Ok((value, &text[at..])),
            _ => value.push(character),
        }
    }
    if is_quoted {
        return Err(malformed("a quoted value has no end"));
    }
    Ok((value, ""))
}

/// `user:password@host:port,host:port/dbname?key=value&…`, all of it optional.
fn url(text: &str) -> Result<Pairs> {
    let (text, query) = text.split_once('?').unwrap_or((text, ""));
    let (place, dbname) = text.split_once('/').unwrap_or((text, ""));
    let (who, hosts) = match place.rsplit_once('@') {
        Some((who, hosts)) => (who, hosts),
        None => ("", place),
    };
    let (user, password) = who.split_once(':').unwrap_or((who, ""));
    let mut pairs = Vec::new();
    let mut add = |key: &str, value: &str| -> Result<()> {
        if !value.is_empty() {
            pairs.push((key.to_owned(), decoded(value)?));
        }
        Ok(())
    };
    add("user", user)?;
    add("password", password)?;
    add("dbname", dbname)?;
    // An item that is empty is as usual.
    let (names, ports): (Vec<&str>, Vec<&str>) = hosts.split(',').map(host_and_port).unzip();
    add("host", &names.join(","))?;
    add("port", &ports.join(","))?;
    for pair in query.split('&').filter(|pair| !pair.is_empty()) {
        let (key, value) =
            pair.split_once('=').ok_or_else(|| malformed(&format!("no = in \"{pair}\"")))?;
        match (key, value) {
            // As JDBC writes it, which libpq takes, too.
            ("ssl", "true") => add("sslmode", "require")?,
            _ => add(&decoded(key)?, value)?,
        }
    }
    Ok(pairs)
}

/// An IPv6 address is in brackets.
fn host_and_port(text: &str) -> (&str, &str) {
    if let Some((address, rest)) = text.strip_prefix('[').and_then(|text| text.split_once(']')) {
        return (address, rest.trim_start_matches(':'));
    }
    text.rsplit_once(':').unwrap_or((text, ""))
}

fn decoded(text: &str) -> Result<String> {
    let decoded = percent_decode_str(text).decode_utf8();
    Ok(decoded.map_err(|_| malformed("it is no UTF-8"))?.into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Vec<String> {
        let pairs = parse(text).unwrap_or_else(|error| panic!("{text}: {error}"));
        pairs.into_iter().map(|(key, value)| format!("{key}={value}")).collect()
    }

    #[test]
    fn keywords_and_values() {
        assert_eq!(
            read(r"host = db1,db2 port=5433 password='it\'s a \\ secret' dbname=a\ b user=''"),
            ["host=db1,db2", "port=5433", r"password=it's a \ secret", "dbname=a b", "user="]
        );
        assert_eq!(read("  "), [""; 0]);
        for bad in ["host=a dbname", "a b=c", "user='x"] {
            assert!(parse(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn urls() {
        assert_eq!(
            read("postgresql://me:p%40ss@db1:5433,[::1]:5434/shop?sslmode=verify-full&ssl=true"),
            [
                "user=me",
                "password=p@ss",
                "dbname=shop",
                "host=db1,::1",
                "port=5433,5434",
                "sslmode=verify-full",
                "sslmode=require"
            ]
        );
        assert_eq!(read("postgres://"), [""; 0]);
        assert_eq!(read("postgres://db1,db2"), ["host=db1,db2", "port=,"]);
        assert_eq!(read("postgres:///shop?host=/tmp"), ["dbname=shop", "host=/tmp"]);
        assert_eq!(read("postgres://%2Ftmp/shop"), ["dbname=shop", "host=/tmp"]);
        assert!(parse("postgres://db/shop?sslmode").is_err());
    }

    #[test]
    fn a_name_is_no_string() {
        assert!(!is_one("shop"));
        assert!(is_one("dbname=shop") && is_one("postgres://db") && is_one("postgresql:///shop"));
    }
}
