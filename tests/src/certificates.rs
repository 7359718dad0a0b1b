//! Certificates made by openssl, in the files that QEMU, libnbd and [`WebServer`](crate::web_server::WebServer) look for.

use crate::program::{required, run_in};
use std::path::Path;

/// Runs openssl(1) in `dir`. `line` is split at blanks.
///
/// # Panics
/// If openssl is missing or fails.
pub fn openssl(dir: &Path, line: &str) {
    run_in(dir, &required("openssl"), line.split_whitespace()).ok();
}

/// Makes an authority, and a server and a client for `localhost`.
///
/// # Panics
/// If openssl is missing or fails.
pub fn certificates(dir: &Path) {
    issue(dir, "ca", "ca", "/CN=authority", AUTHORITY);
    issue(dir, "server", "ca", "/CN=localhost", "subjectAltName=DNS:localhost\n");
    client_certificate(dir, "/CN=localhost");
}

/// Makes `client-cert.pem` and `client-key.pem` for a subject, signed by the authority of [`certificates`].
///
/// # Panics
/// If openssl is missing or fails.
pub fn client_certificate(dir: &Path, subject: &str) {
    issue(dir, "client", "ca", subject, "extendedKeyUsage=clientAuth\n");
}

/// Extensions of an authority.
pub const AUTHORITY: &str = "basicConstraints=critical,CA:TRUE\n";

/// Makes `NAME-cert.pem` and `NAME-key.pem` with these extensions, signed by the certificate of another name or, if it is the
/// same, by itself.
///
/// # Panics
/// If openssl is missing or fails.
pub fn issue(dir: &Path, name: &str, signer: &str, subject: &str, extensions: &str) {
    std::fs::write(dir.join(format!("{name}.ext")), extensions).expect("a file");
    openssl(
        dir,
        &format!("req -newkey rsa:2048 -nodes -subj {subject} -keyout {name}-key.pem -out {name}.csr"),
    );
    let by = if name == signer {
        format!("-signkey {name}-key.pem")
    } else {
        format!("-CA {signer}-cert.pem -CAkey {signer}-key.pem -CAcreateserial")
    };
    openssl(dir, &format!("x509 -req -in {name}.csr {by} -days 2 -extfile {name}.ext -out {name}-cert.pem"));
}

/// Makes an authority whose time was a day of 2020.
///
/// # Panics
/// If openssl is missing or fails.
pub fn expired_authority(dir: &Path, name: &str) {
    issue(dir, name, name, "/CN=old", AUTHORITY);
    std::fs::write(dir.join("index.txt"), "").expect("a file");
    let settings = "[ca]\ndefault_ca=it\n[it]\ndatabase=index.txt\ndefault_md=sha256\nrand_serial=yes\nnew_certs_dir=.\n\
                    policy=any\nunique_subject=no\n[any]\ncommonName=supplied\n";
    std::fs::write(dir.join("ca.cnf"), settings).expect("a file");
    let time = "-startdate 20200101000000Z -enddate 20200102000000Z";
    openssl(
        dir,
        &format!(
            "ca -batch -notext -config ca.cnf -selfsign -keyfile {name}-key.pem -in {name}.csr {time} -extfile {name}.ext \
             -out {name}-cert.pem"
        ),
    );
}

/// Until when a list of revoked certificates is valid.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Validity {
    /// For two days.
    Now,
    /// It has been for a day of 2020.
    Expired,
}

/// Makes `ca-crl.pem`, in which the authority of [`certificates`] revokes a certificate.
///
/// # Panics
/// If openssl is missing or fails.
pub fn revoke(dir: &Path, certificate: &str, validity: Validity) {
    let settings = "[ca]\ndefault_ca=it\n[it]\ndatabase=index.txt\ndefault_md=sha256\ncrlnumber=number\ncrl_extensions=x\n\
                    [x]\nauthorityKeyIdentifier=keyid:always\n";
    std::fs::write(dir.join("number"), "01\n").expect("a file");
    std::fs::write(dir.join("ca.cnf"), settings).expect("a file");
    std::fs::write(dir.join("index.txt"), "").expect("a file");
    let until = match validity {
        Validity::Now => "-crldays 2",
        Validity::Expired => "-crl_lastupdate 20200101000000Z -crl_nextupdate 20200102000000Z",
    };
    let authority = "ca -config ca.cnf -keyfile ca-key.pem -cert ca-cert.pem";
    openssl(dir, &format!("{authority} -revoke {certificate}"));
    openssl(dir, &format!("{authority} -gencrl {until} -out ca-crl.pem"));
}
