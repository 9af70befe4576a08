//! What a lease is of.

use std::sync::Arc;

/// One name, or several: whatever is taken where a lease is asked for.
#[derive(Debug, Clone)]
pub struct Names(pub(crate) Arc<[String]>);

impl From<&str> for Names {
    fn from(name: &str) -> Names {
        Names([name.to_owned()].into())
    }
}

impl From<&String> for Names {
    fn from(name: &String) -> Names {
        Names::from(name.as_str())
    }
}

impl From<String> for Names {
    fn from(name: String) -> Names {
        Names([name].into())
    }
}

impl<N: Into<String>, const COUNT: usize> From<[N; COUNT]> for Names {
    fn from(names: [N; COUNT]) -> Names {
        Names(names.into_iter().map(Into::into).collect())
    }
}

impl<N: Into<String>> From<Vec<N>> for Names {
    fn from(names: Vec<N>) -> Names {
        Names(names.into_iter().map(Into::into).collect())
    }
}

impl<N: AsRef<str>> From<&[N]> for Names {
    fn from(names: &[N]) -> Names {
        Names(names.iter().map(|name| name.as_ref().to_owned()).collect())
    }
}
