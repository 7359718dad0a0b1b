//! Times that have no end are as good as a year: no instant is so far away.
#![cfg(all(feature = "http", feature = "nbd"))]

use std::io::{Read, Write};
use std::net::TcpListener;
use std::time::Duration;

#[test]
fn a_web_server_is_asked_with_a_timeout_without_end() {
    use zebu_remote::http::{HttpDisk, HttpOptions, HttpUrl};
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}/none", listener.local_addr().unwrap());
    let server = std::thread::spawn(move || {
        let (mut client, _) = listener.accept().unwrap();
        assert!(client.read(&mut [0; 4096]).unwrap() > 0);
        client.write_all(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n").unwrap();
    });
    let options = HttpOptions::default().timeout(Duration::MAX).connect_timeout(Duration::MAX);
    let error = HttpDisk::open(HttpUrl::parse(&url).unwrap(), options).err().unwrap();
    assert!(error.to_string().contains("404"), "{error}");
    server.join().unwrap();
}

#[test]
fn an_nbd_server_is_asked_with_a_timeout_without_end() {
    use zebu_remote::nbd::{NbdAddress, NbdDisk, NbdOptions};
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let name = format!("nbd://{}/", listener.local_addr().unwrap());
    let server = std::thread::spawn(move || {
        let (mut client, _) = listener.accept().unwrap();
        client.write_all(b"no server of disks").unwrap();
        let _ = client.read(&mut [0; 4096]);
    });
    let options = NbdOptions::default().timeout(Duration::MAX).connect_timeout(Duration::MAX);
    assert!(NbdDisk::open(NbdAddress::parse(&name).unwrap(), options).is_err());
    server.join().unwrap();
}
