//! NBD over TLS, with certificates made by openssl and libnbd as the client.

use std::path::Path;
use std::process::Command;
use zebu_tests::certificates::{certificates, openssl};
use zebu_tests::nbd_client::{Client, ERROR, option};
use zebu_tests::program::{Finished, finish, required, zebu};
use zebu_tests::scratch::Scratch;
use zebu_tests::server::Server;

/// The reply to an option without TLS.
const TLS_REQUIRED: u32 = ERROR + 5;

fn nbd(dir: &Path, program: &str, args: &[&str]) -> Finished {
    let mut command = Command::new(required(program));
    command.args(args).current_dir(dir);
    finish(command)
}

#[test]
fn clients_with_certificates_are_served() {
    let scratch = Scratch::new("tls");
    let dir = scratch.path();
    certificates(dir);
    zebu(dir, ["create", "-q", "-f", "qcow2", "disk.qcow2", "32M"]).ok();
    let content: Vec<u8> = (0..8u32 << 20).flat_map(u32::to_le_bytes).collect();
    std::fs::write(dir.join("source.raw"), &content).unwrap();
    for options in ["", "--tls-client-ca ca-cert.pem"] {
        let server = Server::start(
            dir,
            &format!(
                "--queues 2 --tls-certificate server-cert.pem --tls-key server-key.pem {options} -f qcow2 disk.qcow2"
            ),
        );
        let socket = server.socket().display().to_string();
        let uri = format!("nbds+unix://localhost/?socket={socket}&tls-certificates={}", dir.display());
        let out = nbd(dir, "nbdinfo", &[&uri]).ok();
        assert!(out.stdout.contains("with TLS"), "{out}");
        nbd(dir, "nbdcopy", &["--flush", "source.raw", &uri]).ok();
        nbd(dir, "nbdcopy", &[&uri, "back.raw"]).ok();
        assert!(std::fs::read(dir.join("back.raw")).unwrap() == content);
        // A client without a certificate, but with the authority.
        std::fs::create_dir_all(dir.join("anonymous")).unwrap();
        std::fs::copy(dir.join("ca-cert.pem"), dir.join("anonymous/ca-cert.pem")).unwrap();
        let anonymous =
            format!("nbds+unix://localhost/?socket={socket}&tls-certificates={}/anonymous", dir.display());
        let code = i32::from(!options.is_empty());
        nbd(dir, "nbdinfo", &["--size", &anonymous]).exits(code);
        // Without TLS, nothing is told.
        nbd(dir, "nbdinfo", &["--size", &server.uri("")]).exits(1);
        let mut client = Client::start(server.socket()).unwrap();
        for code in [option::LIST, option::STRUCTURED_REPLY, 99] {
            assert_eq!(client.ask(code, b"").unwrap().0, TLS_REQUIRED);
        }
        assert!(client.go("").is_err());
        let mut client = Client::start(server.socket()).unwrap();
        client.option(option::EXPORT_NAME, b"").unwrap();
        assert!(client.is_closed());
        // What comes before the answer to STARTTLS is not taken for something encrypted.
        let mut client = Client::start(server.socket()).unwrap();
        let mut bytes = b"IHAVEOPT".to_vec();
        bytes.extend([0, 0, 0, 5, 0, 0, 0, 0]);
        bytes.extend(b"IHAVEOPT");
        bytes.extend([0, 0, 0, 3, 0, 0, 0, 0]);
        client.say(&bytes).unwrap();
        assert!(client.is_closed());
        // And something else than TLS ends the session.
        let mut client = Client::start(server.socket()).unwrap();
        assert_eq!(client.ask(5, b"").unwrap().0, 1);
        client.say(&[0x55; 1000]).unwrap();
        assert!(client.is_closed());
        nbd(dir, "nbdinfo", &["--size", &uri]).ok();
        // Of all that was wrong, the first handshake that failed is told.
        let said = server.stop_with_messages();
        assert!(said.contains("is sent away: TLS: ") && said.lines().count() == 1, "{said}");
    }
}

#[test]
fn a_client_with_a_certificate_of_version_1_is_told_of_in_the_log() {
    let scratch = Scratch::new("tls");
    let dir = scratch.path();
    certificates(dir);
    let request = "req -newkey rsa:2048 -nodes -subj /CN=old -keyout old-key.pem -out old.csr";
    let sign =
        "x509 -req -in old.csr -CA ca-cert.pem -CAkey ca-key.pem -CAcreateserial -days 2 -out old-cert.pem";
    for line in [request, sign] {
        openssl(dir, line);
    }
    std::fs::create_dir(dir.join("old")).unwrap();
    for (from, to) in [
        ("ca-cert.pem", "ca-cert.pem"),
        ("old-cert.pem", "client-cert.pem"),
        ("old-key.pem", "client-key.pem"),
    ] {
        std::fs::copy(dir.join(from), dir.join("old").join(to)).unwrap();
    }
    zebu(dir, ["create", "-q", "-f", "qcow2", "disk.qcow2", "1M"]).ok();
    let tls = "--tls-certificate server-cert.pem --tls-key server-key.pem --tls-client-ca ca-cert.pem";
    let server = Server::start(dir, &format!("{tls} -f qcow2 disk.qcow2"));
    let socket = server.socket().display();
    let uri = format!("nbds+unix://localhost/?socket={socket}&tls-certificates={}/old", dir.display());
    nbd(dir, "nbdinfo", &["--size", &uri]).exits(1);
    let said = server.stop_with_messages();
    assert!(said.contains("X.509 version 1") && said.contains("warning: client of process"), "{said}");
}

#[test]
fn files_that_are_no_certificates_are_named() {
    let scratch = Scratch::new("tls");
    let dir = scratch.path();
    certificates(dir);
    zebu(dir, ["create", "-q", "-f", "qcow2", "disk.qcow2", "1M"]).ok();
    for (certificate, key, named) in [
        ("nosuch.pem", "server-key.pem", "nosuch.pem"),
        ("server-cert.pem", "server-cert.pem", "server-cert.pem"),
        ("server-key.pem", "server-key.pem", "server-key.pem"),
        ("server-cert.pem", "client-key.pem", "server-cert.pem"),
    ] {
        let words = [
            "serve",
            "--nbd",
            "unix:s",
            "--tls-certificate",
            certificate,
            "--tls-key",
            key,
            "-f",
            "qcow2",
            "disk.qcow2",
        ];
        let out = zebu(dir, words).exits(1);
        assert!(out.stderr.contains(named), "{named} is not named: {out}");
        assert_eq!(out.stderr.lines().count(), 1, "{out}");
    }
    let words =
        "serve --vhost-user-blk v --tls-certificate server-cert.pem --tls-key server-key.pem disk.qcow2";
    let out = zebu(dir, words.split_whitespace()).exits(1);
    assert!(out.stderr.contains("--nbd"), "{out}");
}
