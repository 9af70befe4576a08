//! The lease that guards a row: the template in the trigger's arguments, filled from the row's columns.

use crate::errors::{self, Report};
use crate::leases::guard;
use crate::pg::fenced_table::trigger::{Attribute, Columns, Tuple};
use crate::pg::session::settings;
use pg_fence_rules::template::{self, Piece};
use pg_fence_rules::{NAME_MAX, Token};
use std::borrow::Cow;

/// The parsed template of a table's leases.
pub struct Binding(Vec<Part>);

enum Part {
    Literal(Vec<u8>),
    Column(Attribute, Vec<u8>),
}

/// The leases of a write: that of the new row and, if it differs, that of the old one.
#[derive(Default)]
pub struct WriteLeases<'a> {
    new: Option<Cow<'a, [u8]>>,
    old: Option<Cow<'a, [u8]>>,
}

impl WriteLeases<'_> {
    /// The leases without duplicates, that of the new row first.
    pub fn iter(&self) -> impl Iterator<Item = &[u8]> {
        self.new.iter().chain(&self.old).map(|name| &**name)
    }

    /// The token of the guard of one of these leases, or else of the setting.
    #[inline]
    pub fn ambient(&self) -> Option<Token> {
        self.iter().find_map(guard::token_for).or_else(settings::token)
    }
}

impl Binding {
    /// Parses a template. Each placeholder must name a suitable column.
    pub fn new(text: &[u8], columns: &Columns) -> Result<Self, Report> {
        let pieces = template::parse(text).map_err(|fault| {
            errors::bad_trigger_argument(format!("in the lease {}: {fault}", errors::quoted(text)))
        })?;
        let part = |piece| match piece {
            Piece::Literal(text) => Ok(Part::Literal(text)),
            Piece::Column(name) => {
                let attribute = columns.find(&name).ok_or_else(|| errors::no_column(&name))?;
                if attribute.fits_placeholder() {
                    Ok(Part::Column(attribute, name))
                } else {
                    Err(errors::wrong_type(
                        &name,
                        "a plain column of integer, text, varchar, uuid or boolean type",
                    ))
                }
            }
        };
        Ok(Binding(pieces.into_iter().map(part).collect::<Result<_, _>>()?))
    }

    /// The columns in the placeholders.
    pub fn columns(&self) -> impl Iterator<Item = &Attribute> {
        self.0.iter().filter_map(|part| match part {
            Part::Literal(_) => None,
            Part::Column(attribute, _) => Some(attribute),
        })
    }

    /// The lease of a row.
    pub fn lease(&self, columns: &Columns, row: Tuple) -> Result<Cow<'_, [u8]>, Report> {
        if let [Part::Literal(name)] = self.0.as_slice() {
            return checked(name).map(Cow::Borrowed);
        }
        let mut name = Vec::with_capacity(32);
        for part in &self.0 {
            match part {
                Part::Literal(text) => name.extend_from_slice(text),
                Part::Column(attribute, column) => {
                    if !columns.append_text(&mut name, row, attribute) {
                        return Err(errors::null_placeholder(column));
                    }
                }
            }
        }
        checked(&name)?;
        Ok(Cow::Owned(name))
    }

    /// The leases of a write.
    pub fn leases(
        &self,
        columns: &Columns,
        old: Option<Tuple>,
        new: Option<Tuple>,
    ) -> Result<WriteLeases<'_>, Report> {
        let new_lease = new.map(|new| self.lease(columns, new)).transpose()?;
        let old = old.filter(|old| !new.is_some_and(|new| self.same(columns, *old, new)));
        let old_lease = old.map(|old| self.lease(columns, old)).transpose()?;
        Ok(WriteLeases {
            old: old_lease.filter(|old| new_lease.as_ref() != Some(old)),
            new: new_lease,
        })
    }

    /// Returns true if both rows have the same numbers in the placeholders. Columns of other types make it false, and
    /// the names are compared.
    fn same(&self, columns: &Columns, old: Tuple, new: Tuple) -> bool {
        self.0.iter().all(|part| match part {
            Part::Literal(_) => true,
            Part::Column(attribute, _) => columns.same_number(old, new, attribute),
        })
    }
}

#[inline]
fn checked(name: &[u8]) -> Result<&[u8], Report> {
    if (1..=NAME_MAX).contains(&name.len()) { Ok(name) } else { Err(errors::unfit_lease_name()) }
}
