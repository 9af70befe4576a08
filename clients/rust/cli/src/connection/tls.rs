//! Encryption by rustls, and the checks of the server's certificate.

use crate::failure::{Failure, Result};
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::verify_server_cert_signed_by_trust_anchor;
use rustls::crypto::{CryptoProvider, ring, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::server::ParsedCertificate;
use rustls::version::TLS13;
use rustls::{
    ClientConfig, DEFAULT_VERSIONS, DigitallySignedStruct, Error as TlsError, RootCertStore,
    SignatureScheme,
};
use std::path::{Path, PathBuf};
use std::sync::Arc;
pub use tokio_postgres_rustls::MakeRustlsConnect;

/// The certificate authorities that are trusted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Trust {
    /// The authorities in this file.
    File(PathBuf),
    /// The authorities that the system trusts.
    System,
}

/// The part of a certificate that is checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Check {
    /// Nothing is checked. The connection is encrypted, but any server may answer.
    Nothing,
    /// A trusted authority must have signed the certificate.
    Issuer(Trust),
    /// In addition, the certificate must name the host.
    IssuerAndName(Trust),
}

/// Returns the encryption of connections. `client` is the client's certificate and its key, as files in PEM. Fails if a
/// file cannot be read, or no authority is trusted.
pub fn connector(
    check: &Check,
    client: Option<(&Path, &Path)>,
    is_only_13: bool,
) -> Result<MakeRustlsConnect> {
    let provider = Arc::new(ring::default_provider());
    let builder = ClientConfig::builder_with_provider(provider.clone());
    let versions: &[_] = if is_only_13 { &[&TLS13] } else { DEFAULT_VERSIONS };
    let builder = builder.with_protocol_versions(versions).map_err(unfit)?;
    let lenient = |roots| Arc::new(Lenient { roots, provider });
    let builder = match check {
        Check::IssuerAndName(trust) => builder.with_root_certificates(roots(trust)?),
        Check::Nothing => builder.dangerous().with_custom_certificate_verifier(lenient(None)),
        Check::Issuer(trust) => {
            let lenient = lenient(Some(roots(trust)?));
            builder.dangerous().with_custom_certificate_verifier(lenient)
        }
    };
    let config = match client {
        None => builder.with_no_client_auth(),
        Some((certificates, key)) => {
            let chain = certificates_in(certificates)?;
            let key = PrivateKeyDer::from_pem_file(key).map_err(|error| unread(key, &error))?;
            builder.with_client_auth_cert(chain, key).map_err(unfit)?
        }
    };
    Ok(MakeRustlsConnect::new(config))
}

fn roots(trust: &Trust) -> Result<RootCertStore> {
    let mut roots = RootCertStore::empty();
    match trust {
        Trust::File(path) => {
            for certificate in certificates_in(path)? {
                roots.add(certificate).map_err(unfit)?;
            }
        }
        // Certificates that cannot be parsed are left out, as in other programs.
        Trust::System => {
            roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
        }
    }
    if roots.is_empty() {
        return Err(Failure::usage("there is no certificate to trust"));
    }
    Ok(roots)
}

fn certificates_in(path: &Path) -> Result<Vec<CertificateDer<'static>>> {
    let found = CertificateDer::pem_file_iter(path).and_then(Iterator::collect);
    found.map_err(|error| unread(path, &error))
}

fn unread(path: &Path, error: &dyn std::fmt::Display) -> Failure {
    Failure::usage(format!("{}: {error}", path.display()))
}

fn unfit(error: TlsError) -> Failure {
    Failure::usage(format!("TLS: {error}"))
}

/// Verifies the issuer of a certificate if there are `roots`, but never the name.
#[derive(Debug)]
struct Lenient {
    roots: Option<RootCertStore>,
    provider: Arc<CryptoProvider>,
}

/// A method that verifies a signature as the function of that name does.
macro_rules! verifies {
    ($name:ident) => {
        fn $name(
            &self,
            message: &[u8],
            certificate: &CertificateDer<'_>,
            signed: &DigitallySignedStruct,
        ) -> std::result::Result<HandshakeSignatureValid, TlsError> {
            $name(message, certificate, signed, &self.provider.signature_verification_algorithms)
        }
    };
}

impl ServerCertVerifier for Lenient {
    verifies!(verify_tls12_signature);
    verifies!(verify_tls13_signature);

    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        now: UnixTime,
    ) -> std::result::Result<ServerCertVerified, TlsError> {
        if let Some(roots) = &self.roots {
            verify_server_cert_signed_by_trust_anchor(
                &ParsedCertificate::try_from(end_entity)?,
                roots,
                intermediates,
                now,
                self.provider.signature_verification_algorithms.all,
            )?;
        }
        Ok(ServerCertVerified::assertion())
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}
