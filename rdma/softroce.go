package rdma

import "errors"

func openSoftroce(name string, o *options) (*Fabric, error) {
	return nil, errors.New("no RDMA device")
}
